#!/bin/bash
# Train on two machines with 8 GPUs each: sbatch slurm.sh /shared/run.yaml /shared/runs/grpo
# Shortly before the job's time limit, the run saves a checkpoint and the job is requeued. It then resumes from that checkpoint.
# A job whose run fails is not requeued.
#SBATCH --job-name=psigrad
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@900
#SBATCH --requeue
#SBATCH --open-mode=append

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
time_is_over=0
trap 'time_is_over=1; kill -TERM "$step"' TERM   # srun and torchrun forward it: each rank ends its step and saves

# by default torchrun kills its ranks after 30 s, but a step and a checkpoint take longer
srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --max-restarts=3 --shutdown-timeout=840 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29500" \
  -m psigrad grpo --config "$1" --output-dir "$2" --strategy fsdp &
step=$!
wait "$step"; status=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; status=$?; done   # the signal interrupted the first wait

if [ "$time_is_over" = 1 ] && [ "$status" != 0 ]; then scontrol requeue "$SLURM_JOB_ID"; exit 0; fi
exit "$status"
