# The common part of the templates. Each job has a directory of its own, which only its owner can read:
#   JOB/keys   keys of the controller and the workers     JOB/run   the run directory
# With several nodes, this directory and the model must lie on a file system that all nodes mount.
export PATH={{BIN}}:"$PATH"
export PYTHONSAFEPATH=1 # never import modules from the working directory
job={{RUNS}}/$SLURM_JOB_ID
umask 077
mkdir -p "$job"
[ -d "$job/keys" ] || flowrt keys "$job/keys"
export FLOWRT_KEYS=$job/keys

# Start the run, or resume it after a requeue; exits with the exit code of the run. Arguments: those of flowrt run.
# SLURM sends USR1 before the time limit: the run saves a checkpoint and ends, and the job is requeued. If SLURM itself
# preempts and requeues the job, it may send TERM first, on which the run also saves and ends. Without a signal, steps
# after the last checkpoint are lost and trained again.
run_flowrt() {
  local again="" code=0
  if [ -f "$job/run/config.toml" ]; then
    set -- resume "$job/run"
  else
    set -- run "$@" --run-dir "$job/run"
  fi
  {{IN_CONTAINER}}flowrt "$@" &
  local flowrt=$!
  trap 'signalled=yes again=yes && kill -TERM "$flowrt" || true' USR1
  trap 'signalled=yes && kill -TERM "$flowrt" || true' TERM INT
  local signalled=yes
  while [ -n "$signalled" ]; do # a signal ends `wait` before the run has ended
    signalled="" code=0
    wait "$flowrt" || code=$?
  done
  if [ -n "$again" ] && [ "$code" -ne 0 ] && [ {{REQUEUE}} = requeue ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
