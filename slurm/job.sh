#!/bin/bash
# The steps of every job, sourced by the templates: preflight, run folder, servers, trainers, and requeue or end.
#
#   train [SCRIPT.py] +experiment=NAME [KNOB=VALUE ...]      (SCRIPT.py: your training script, run on every rank)
#   evaluate +experiment=NAME [KNOB=VALUE ...]
#
# A job ends with the run's exit code. It is requeued and continues from its last checkpoint
#   - before its time limit: Slurm sends this shell USR1 (#SBATCH --signal=B:USR1@SECONDS), and the trainers stop after
#     their step, with a checkpoint. An attempt without a checkpoint is not repeated;
#   - when it is preempted: Slurm sends TERM to all tasks, with the same effect on the trainers;
#   - when a node fails: nodes that start no task are excluded from the next attempt.
# scancel ends it: the trainers get TERM, and then the time of Slurm's KillWait. An error of the run is not retried.
set -uo pipefail
unset SLURM_EXPORT_ENV # set by sbatch --export=NONE: steps would start without the variables that are set here

: "${SLURM_JOB_ID:?this is for a Slurm job: sbatch slurm/grpo_70b.sh, or python -m megarl.launcher.slurm}"
MEGARL_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MEGARL_HOME
# shellcheck source=slurm/env.sh
source "$MEGARL_HOME/slurm/env.sh"
if [[ -z $MEGARL_IMAGE && -f $MEGARL_HOME/pyproject.toml ]]; then # a checkout; an image contains megarl
  export PYTHONPATH=$MEGARL_HOME${PYTHONPATH:+:$PYTHONPATH}
fi

# The node plan (megarl/launcher/slurm.py), in the order of the job's nodes.
RANKS=0 RANKS_PER_NODE=0 RANK_NODES=0 SERVERS=0 SERVERS_PER_NODE=0 SERVER_NODES=0 FIRST_SERVER_NODE=0 FIRST_SERVER_GPU=0
RUN_FOLDER="" LOGS="" JOB_FOLDER="" RESUME=""
CHECKPOINT="" # newest one at the start of this attempt
nodes=() # names of the job's nodes
asked="" # "requeue" or "end", after a signal
cause="" # why the ranks failed, in a few words
say() { echo "$(date +%T) $*"; }

# --- commands and job steps --------------------------------------------------------------------------------------------

image=()         # prefix of a command, with apptainer
image_options=() # options of srun, with pyxis
case $MEGARL_IMAGE in
  "") ;;
  *.sif) image=(apptainer exec --nv --bind "$PWD,$MEGARL_HOME${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}" "$MEGARL_IMAGE") ;;
  *)
    mounts=$PWD:$PWD,$MEGARL_HOME:$MEGARL_HOME${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}
    image_options=("--container-image=$MEGARL_IMAGE" "--container-mounts=$mounts" "--container-workdir=$PWD")
    ;;
esac

# here MODULE ARGUMENT...: runs a command of megarl on this node. Only srun enters an image of pyxis.
here() {
  if ((${#image_options[@]})); then
    srun --nodes=1 --ntasks=1 --overlap "${image_options[@]}" "$MEGARL_PYTHON" -m "$@"
  else
    "${image[@]}" "$MEGARL_PYTHON" -m "$@"
  fi
}

# step NAME NODES TASKS TASKS_PER_NODE COMMAND...: replaces this shell by a job step with a log for each task. Nodes are
# filled in turn, as the plan assumes: "block" would spread the tasks evenly, and takes no limit for a node. Steps may
# overlap on a node that trainers and servers share; the plan assigns the GPUs. Ranks end together: srun gives the others
# MEGARL_GRACE_S once one has ended, and no time if it failed. A server may fail while others serve. What srun says of its
# tasks is kept beside their logs.
step() {
  local name=$1 where=$2 tasks=$3 per_node=$4 count together=(--kill-on-bad-exit=0)
  shift 4
  if [[ $name == rank ]]; then together=(--kill-on-bad-exit=1 --wait="$MEGARL_GRACE_S"); fi
  count=$(tr ',' '\n' <<<"$where" | wc -l)
  exec srun --job-name="$name" --nodes="$count" --nodelist="$where" --ntasks="$tasks" \
    --distribution=plane="$per_node" --overlap --cpu-bind=none "${together[@]}" --output="$LOGS/${name}_%t.log" \
    "${image_options[@]}" "${image[@]}" "$@" 2> >(exec tee -a "$LOGS/$name.srun" >&2)
}

# signal_step NAME SIGNAL: signals every task of a step. (TERM to srun itself would end the step.)
signal_step() {
  local id name
  while read -r id name; do
    if [[ $name == "$1" ]]; then scancel --signal="$2" "$id"; fi
  done < <(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j')
}

# --- the end of a job --------------------------------------------------------------------------------------------------

# requeue [NODES]: requeues the job without NODES (comma-separated) and the nodes excluded before.
requeue() {
  if ((${SLURM_RESTART_COUNT:-0} >= MEGARL_MAX_REQUEUES)); then
    say "requeued MEGARL_MAX_REQUEUES=$MEGARL_MAX_REQUEUES times already; not again"
    exit 1
  fi
  trap '' TERM # sent to this shell by a requeue
  say "requeued${1:+ without $1}"
  scontrol requeue "$SLURM_JOB_ID" || exit 1
  exclude "${1:-}"
  exit 0
}

# exclude NODES: excludes nodes from the next attempt of a requeued job.
exclude() {
  local before
  before=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p')
  if [[ $before == "(null)" ]]; then before=""; fi
  if [[ -n $1 ]]; then scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$1${before:+,$before}"; fi
}

# leave NODES: requeues the job without NODES, which start no task. Slurm marks silent nodes as down and requeues the job
# itself. This waits for it: Slurm 22.05 gives no GPUs to a job that was requeued earlier ("Invalid generic resource"),
# and would not start it sooner. A node that answers Slurm but starts nothing is never marked.
leave() {
  local limit found="" second
  limit=$(($(scontrol show config | sed -n 's/^SlurmdTimeout *= *\([0-9]*\).*/\1/p') + 60))
  trap 'found=1' TERM
  say "$1 starts no task; Slurm has $limit s to find it down"
  for ((second = 0; second < limit; second++)); do
    if [[ -n $found ]]; then
      exclude "$1"
      exit 1
    fi
    sleep 1 &
    wait $!
  done
  requeue "$1"
}

# failed_nodes: prints the job's nodes that do not start a task.
failed_nodes() {
  local node probes=() failed=()
  for node in "${nodes[@]}"; do
    timeout --kill-after=5 "$MEGARL_PROBE_S" \
      srun --job-name=probe --nodes=1 --ntasks=1 --nodelist="$node" --overlap true >/dev/null 2>&1 &
    probes+=($!)
  done
  for node in "${!nodes[@]}"; do
    wait "${probes[$node]}" || failed+=("${nodes[$node]}")
  done
  (IFS=, && echo "${failed[*]}")
}

# newest_checkpoint: prints the name of the newest checkpoint of the run, or of its adapters' runs, or nothing.
newest_checkpoint() {
  local folders=()
  if [[ -z $RUN_FOLDER ]]; then return; fi
  mapfile -t folders < <(compgen -G "$RUN_FOLDER/checkpoints/step_*[0-9]")
  mapfile -t -O "${#folders[@]}" folders < <(compgen -G "$RUN_FOLDER/adapters/*/checkpoints/step_*[0-9]")
  if ((${#folders[@]})); then basename --multiple "${folders[@]}" | sort | tail -n 1; fi
}

# first_failure: prints what srun said of the first rank that failed, such as "node1: task 3: Killed".
first_failure() {
  sed -n 's/^srun: error: \(.*: tasks\{0,1\} [0-9].*\)/\1/p' "$LOGS/rank.srun" 2>/dev/null | head -n 1
}

# hanging_rank: prints what ranks 0 and 1, which watch all ranks, said of those that hang. They end the job then, so srun
# names them.
hanging_rank() {
  sed -nE 's/^megarl: (ranks? .*(makes no progress|does not run).*)/\1/p' "$LOGS"/rank_[01].log 2>/dev/null | head -n 1
}

# show_logs: prints the ends of logs with errors, that of the first rank that failed last.
show_logs() {
  local log first others
  first=$LOGS/rank_$(sed -nE 's/^(.*: tasks?|ranks?) ([0-9]+).*/\2/p' <<<"$cause").log
  mapfile -t others < <(grep -lsE 'Error|megarl: ' "$LOGS"/{rank,server}_*.log | grep -vxF "$first" | head -n 2)
  for log in "${others[@]}" "$first"; do
    if [[ -f $log ]]; then
      say "the end of $log:"
      tail -n 15 "$log"
    fi
  done
}

# finish CODE: requeues the job, or ends it with the exit code of the trainers. The last line of a failure has its cause.
finish() {
  local code=$1 state failed
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
  if [[ -n $asked && $state == RUNNING ]]; then # near the time limit or preempted; COMPLETING after scancel
    if ((code)) || grep -qs '"stopped_early": true' "$RUN_FOLDER"/{,adapters/*/}summary.json; then
      if [[ $asked == requeue && $(newest_checkpoint) == "$CHECKPOINT" ]]; then
        say "stopped before its time limit without a checkpoint of this attempt: the next would get no further. Not" \
          "requeued; give more time (sbatch --time), or a later signal (--signal=B:USR1@SECONDS)"
        exit 1
      fi
      requeue
    fi
  elif [[ -n $asked ]]; then
    say "stopped by Slurm, job state ${state:-unknown}: Slurm itself requeues it after a failed node or a preemption"
  elif ((code)) && [[ -z $asked ]]; then
    failed=$(failed_nodes)
    if [[ -n $failed ]]; then leave "$failed"; fi
    cause=${cause:-$(hanging_rank)}
    cause=${cause:-$(first_failure)}
    show_logs
  fi
  say "ended with code $code${cause:+: $cause}"
  exit "$code"
}

# --- the steps of a job ------------------------------------------------------------------------------------------------

# prepare KNOB=VALUE...: runs preflight, makes the run's folder, and sets the plan's variables.
prepare() {
  local plan
  say "job $SLURM_JOB_ID, attempt $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then # Slurm before 23.02; preflight reads it
    SLURM_JOB_END_TIME=$(date --date="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)" +%s)
    export SLURM_JOB_END_TIME
  fi
  if ((!${SLURM_RESTART_COUNT:-0})); then here megarl.preflight "$@" || exit; fi
  plan=$(here megarl.launcher.slurm plan "$@") || exit
  eval "$(grep -E '^[A-Z_]+=' <<<"$plan")" # ignores other output of the command
  export MEGARL_RUN_FOLDER=$RUN_FOLDER MEGARL_JOB_FOLDER=$JOB_FOLDER MEGARL_LOGS=$LOGS
  export MEGARL_FIRST_SERVER_GPU=$FIRST_SERVER_GPU
  CHECKPOINT=$(newest_checkpoint)
  say "run folder $RUN_FOLDER, logs $LOGS"
}

# names FIRST COUNT: prints names of the job's nodes, comma-separated.
names() { (IFS=, && echo "${nodes[*]:$1:$2}"); }

train() {
  local script=() servers="" ranks code
  if [[ ${1:-} == *.py ]]; then
    script=("$1")
    shift
  fi
  trap 'asked=requeue; signal_step rank TERM' USR1
  trap 'asked=end' TERM
  prepare "$@"
  if [[ -n $asked ]]; then finish 1; fi
  if [[ -n $RESUME ]]; then set -- "$@" "$RESUME"; fi
  if ((SERVERS)); then
    MEGARL_LLM_SERVER_API_KEY=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    export MEGARL_LLM_SERVER_API_KEY
    step server "$(names "$FIRST_SERVER_NODE" "$SERVER_NODES")" "$SERVERS" "$SERVERS_PER_NODE" \
      "$MEGARL_PYTHON" -m megarl.launcher.server_task "$@" &
    servers=$!
  fi
  step rank "$(names 0 "$RANK_NODES")" "$RANKS" "$RANKS_PER_NODE" \
    bash "$MEGARL_HOME/slurm/rank.sh" "$MEGARL_PYTHON" -m megarl.train "${script[@]}" "$@" &
  ranks=$!
  say "$RANKS ranks on $(names 0 "$RANK_NODES"), $SERVERS servers"
  while kill -0 "$ranks" 2>/dev/null; do
    if [[ -n $servers ]] && ! kill -0 "$servers" 2>/dev/null; then
      cause="no server is left"
      say "$cause"
      signal_step rank KILL
      break
    fi
    sleep 1 &
    wait $! # unlike sleep, a signal interrupts it: the trap runs at once
  done
  wait_for "$ranks"
  code=$?
  if [[ -n $servers ]]; then end_servers "$servers"; fi
  tail -n 5 "$LOGS/rank_0.log"
  finish "$code"
}

# end_servers PID: ends the servers' srun. They end by themselves, except on a failed node.
end_servers() {
  local until=$((SECONDS + MEGARL_GRACE_S))
  : >"$JOB_FOLDER/trainers-ended"
  while kill -0 "$1" 2>/dev/null && ((SECONDS < until)); do sleep 0.5; done
  kill -TERM "$1" 2>/dev/null # srun then waits for at most Slurm's KillWait
  wait_for "$1"
}

# wait_for PID: returns its exit code. Waits again after a signal to this shell.
wait_for() {
  local code=0
  while kill -0 "$1" 2>/dev/null; do
    wait "$1"
    code=$?
  done
  wait "$1" 2>/dev/null
  local last=$?
  ((last == 127)) || code=$last
  return "$code"
}

evaluate() {
  here megarl.preflight "$@" || exit
  here megarl.evaluate "$@"
}
