# The part that all templates share. Each run has a directory of its own, which only its owner can read:
#   JOB/keys   who may take part in the run     JOB/run   what `flowrt run` writes
# On several nodes it must lie on a file system that all of them mount, as must the model.
export PATH={{BIN}}:"$PATH"
export PYTHONSAFEPATH=1 # what happens to lie in the working directory is not imported
job={{RUNS}}/$SLURM_JOB_ID
umask 077
mkdir -p "$job"
[ -d "$job/keys" ] || flowrt keys "$job/keys"
export FLOWRT_KEYS=$job/keys

# Run, or go on after a requeue, to the end; the job leaves with the run's own exit code. Arguments: those of flowrt run.
# SLURM sends USR1 before the time is up: the run saves what it has trained, ends in order, and the job goes back into the
# queue. Where SLURM itself preempts and requeues a job, TERM comes first and does the same if there is time, or nothing
# comes; what the last checkpoint holds is never lost.
run_flowrt() {
  local again="" code=0
  if [ -f "$job/run/config.toml" ]; then
    set -- resume "$job/run"
  else
    set -- run "$@" --run-dir "$job/run"
  fi
  flowrt "$@" &
  local flowrt=$!
  trap 'signalled=yes again=yes && kill -TERM "$flowrt" || true' USR1
  trap 'signalled=yes && kill -TERM "$flowrt" || true' TERM INT
  local signalled=yes
  while [ -n "$signalled" ]; do # a signal ends a wait before the run has ended
    signalled="" code=0
    wait "$flowrt" || code=$?
  done
  if [ -n "$again" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
