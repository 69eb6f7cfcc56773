"""How the ranks of a group that carries weights find each other: vLLM's protocol.

The trainer is rank 0 and holds a `torch.distributed.TCPStore`. The steps, in vLLM's
`StatelessProcessGroup.create` and `PyNcclCommunicator`, of which both sides may be:

1. Each other rank connects to the store with `world_size`, which registers it: the constructor of
   vLLM's store waits for as many registrations. It also sets `rank_key`, for trainers that must know
   which rank is missing, and that must be able to stop waiting.
2. Rank 0 sets `ID_KEY`. With NCCL its value holds the id of the communicator (`nccl_id_in`). With
   gloo, which is for machines without a GPU, only the presence of the key counts.
3. NCCL: all ranks call `ncclCommInitRank`, then one all-reduce of one float32, which warms NCCL up.
   gloo: all ranks form a `ProcessGroupGloo` over the store with the prefix `GLOO_PREFIX`.
"""

import pickletools

# vLLM's key of the first object that rank 0 broadcasts.
ID_KEY = "broadcast_from/0/0"
# Prefix of gloo's keys in the store.
GLOO_PREFIX = "titopool/gloo"
# Size of `ncclUniqueId`.
NCCL_ID_BYTES = 128
# vLLM's pickle of an id has about 240 bytes.
MAX_ID_PAYLOAD_BYTES = 4096


def rank_key(rank: int) -> str:
    """The key that a rank sets when it is ready to form the group."""
    return f"titopool/rank/{rank}"


def nccl_id_in(payload: bytes) -> bytes:
    """NCCL's id in the value of `ID_KEY`: the plain 128 bytes, or vLLM's pickle of `ncclUniqueId`.

    The pickle is searched for its one string of 128 bytes and never loaded: loading runs code that
    the sender chooses.

    Raises:
        ValueError: the payload has no id, or several.
    """
    if len(payload) == NCCL_ID_BYTES:
        return payload
    found = []
    if len(payload) <= MAX_ID_PAYLOAD_BYTES:
        found = [one for one in _byte_strings(payload) if len(one) == NCCL_ID_BYTES]
    if len(found) != 1:
        raise ValueError(
            f"{ID_KEY}: expected NCCL's id, {NCCL_ID_BYTES} bytes, plain or in vLLM's pickle; got "
            f"{len(payload)} bytes with {len(found)} such strings; the trainer must speak vLLM's "
            "weight transfer protocol"
        )
    return found[0]


def _byte_strings(pickled: bytes) -> list[bytes]:
    """The byte strings among the operands of a pickle's operations; none if it is no pickle."""
    try:
        operands = [operand for _, operand, _ in pickletools.genops(pickled)]
    except Exception:
        # The parser raises many types on bytes that are no pickle.
        return []
    return [one for one in operands if isinstance(one, bytes)]
