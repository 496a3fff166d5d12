# What a host does as root for start.sh and stop.sh.  They send this file: sh -s WHAT <host.sh
# Nothing is shared with a Slurm or a munged that is there already: folders, key and socket are of this Slurm's own.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
data=/var/lib/weft-slurm
run=/run/weft-slurm

runs() { # NAME: whether this daemon runs; then pid is its process
    pid=$(cat "$run/$1.pid" "$run/munge/$1.pid" 2>/dev/null || :)
    [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ]
}

end() { # NAME: ends this daemon, and waits for its end
    ! runs "$1" || kill "$pid"
    tries=0
    while runs "$1"; do
        [ "$tries" -lt 60 ] || { echo "$(hostname): $1 has not ended (process $pid)" >&2; exit 1; }
        sleep 1
        tries=$((tries + 1))
    done
}

case $1 in
prepare)
    if [ -f /etc/slurm/slurm.conf ] && ! grep -q 'weft pools init' /etc/slurm/slurm.conf; then
        echo "$(hostname) has another /etc/slurm/slurm.conf: use the Slurm that is there, or move that file away" >&2
        exit 2
    fi
    mkdir -p /etc/slurm
    install -d -m 755 "$data" "$data/slurmd" "$run"
    install -d -m 700 "$data/state"
    install -d -o munge -m 700 "$data/munge"
    install -d -o munge -m 755 "$run/munge"
    ;;
munged) # signs with the key what Slurm's parts tell each other
    chown munge "$data/munge/munge.key"
    runs munged || runuser -u munge -- munged --socket="$run/munge/socket" --pid-file="$run/munge/munged.pid" \
        --key-file="$data/munge/munge.key" --seed-file="$data/munge/seed" --log-file="$data/munge/munged.log"
    ;;
slurmctld | slurmd)
    runs "$1" || "$1"
    ;;
end-jobs) # $2: seconds.  Jobs save after the word to stop; KillWait ends those that do not leave
    scancel --partition=all || exit 0
    tries=0
    while [ -n "$(squeue -h)" ] && [ "$tries" -lt "$2" ]; do
        sleep 1
        tries=$((tries + 1))
    done
    ;;
end)
    end slurmd
    end slurmctld
    end munged
    ;;
esac
