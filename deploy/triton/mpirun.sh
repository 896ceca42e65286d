#!/bin/sh
# Like mpirun, but at SIGTERM Triton can finish running requests, in 30 s or --exit-timeout-secs. mpirun
# alone kills its ranks within two seconds. Rank 0 serves; the other ranks end when rank 0 ends.
mpirun "$@" &
mpirun=$!
ended=

# The trap calls this function. The file of process ids has one line, so `for` may split it.
# shellcheck disable=SC2013,SC2329
end() {
    trap '' TERM INT
    ended=yes
    for pid in $(cat "/proc/$mpirun/task/"*/children); do
        if grep -q shm-region-prefix-name=prefix0_ "/proc/$pid/cmdline"; then
            kill -TERM "$pid"
            while kill -0 "$pid"; do sleep 0.2; done
        fi
    done 2> /dev/null
    kill -TERM "$mpirun" 2> /dev/null
}

trap end TERM INT
wait "$mpirun"
status=$?
# A signal interrupts `wait`, but mpirun still runs, so wait again.
if [ -n "$ended" ]; then
    wait "$mpirun"
    status=$?
fi
exit "$status"
