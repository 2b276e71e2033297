# Ascend NPUs. NOT YET RUN ON SUCH HARDWARE: written from CANN's and torch_npu's documentation; docs/guides/ascend.md says
# what each variable does. CANN's own script reads variables that may not be set.
set +u
source {{CANN}}/set_env.sh
set -u
export HCCL_CONNECT_TIMEOUT=1800 # seconds; workers may reach a rendezvous minutes apart (default 120)
export HCCL_EXEC_TIMEOUT=3600    # seconds; longer than the longest step (default 1836)
export HCCL_EVENT_TIMEOUT=3700   # must be longer than HCCL_EXEC_TIMEOUT
export HCCL_BUFFSIZE=64          # MB for each communicator; flowrt makes one for each lane (default 200)
export P2P_HCCL_BUFFSIZE=20      # MB, twice, for each pair; 0 where memory is tight
export HCCL_HOST_SOCKET_PORT_RANGE=auto HCCL_NPU_SOCKET_PORT_RANGE=auto # several processes share an NPU's ports
export TASK_QUEUE_ENABLE=1 # 2 needs more memory at its peak
