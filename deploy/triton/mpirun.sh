#!/bin/sh
# mpirun, but at SIGTERM Triton ends what it has begun: it gives that 30 s, or --exit-timeout-secs. mpirun
# itself kills its ranks within two seconds. Rank 0 serves; the others live as long as it does.
mpirun "$@" &
mpirun=$!
ended=

# The trap calls it; the file of process ids is one line.
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
# A signal ends the wait, not what is waited for.
if [ -n "$ended" ]; then
    wait "$mpirun"
    status=$?
fi
exit "$status"
