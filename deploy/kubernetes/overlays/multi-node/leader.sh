#!/bin/sh
# Waits for the workers of this group, then starts all ranks of the engine on this pod and on them.
set -eu
# triton-0.triton.NAMESPACE is the leader of triton-0-1.triton.NAMESPACE, triton-0-2...
pod=${LWS_LEADER_ADDRESS%%.*}
domain=${LWS_LEADER_ADDRESS#*.}
echo "$LWS_LEADER_ADDRESS slots=$GPUS_PER_POD" > /tmp/hosts
worker=1
while [ "$worker" -lt "$LWS_GROUP_SIZE" ]; do
    host=$pod-$worker.$domain
    until ssh -F /launch/ssh_config "$host" true; do
        echo "waiting for $host"
        sleep 2
    done
    echo "$host slots=$GPUS_PER_POD" >> /tmp/hosts
    worker=$((worker + 1))
done
# Open MPI 4 also reads its options from such variables, so the command needs no change.
export OMPI_MCA_orte_default_hostfile=/tmp/hosts
export OMPI_MCA_plm_rsh_args='-F /launch/ssh_config'
exec sh /launch/ranks.sh
