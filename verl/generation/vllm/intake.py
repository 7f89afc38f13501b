"""How the engine process takes weights in, by the way that it was told of at its start."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verl.generation.vllm.delivery import WeightTransfer, setup, updates


class Intake(Protocol):
    def join(self) -> None:
        """Meet the sender, where there is one."""
        ...

    def begin(self) -> None: ...

    def take(self, number: int) -> None:
        """Returns when the bucket may be overwritten."""
        ...

    def finish(self) -> None:
        """Raises where a parameter of the model has got nothing."""
        ...


def make_intake(llm: Any, told: Mapping[str, Any], body: bytes) -> Intake:
    """`llm`: vllm.LLM. `told`, `body`: of `Delivery.told`."""
    if told["by"] == WeightTransfer.node_memory:
        return NodeMemoryIntake(llm, told)
    # from the rank that has started this process
    intake = TransferIntake(llm, setup(told), updates(told, pickle.loads(body)))
    if told["by"] == WeightTransfer.ipc:
        intake.join()  # meets nobody
    return intake


class NodeMemoryIntake:
    """The workers read memory that the node shares."""

    def __init__(self, llm: Any, told: Mapping[str, Any]) -> None:
        self._llm = llm
        llm.collective_rpc("verl_open_weights", args=(told["path"], told["buckets"], told["slots"]))

    def join(self) -> None:
        raise AssertionError("nobody sends")

    def begin(self) -> None:
        self._llm.collective_rpc("verl_begin_load")

    def take(self, number: int) -> None:
        self._llm.collective_rpc("verl_take_bucket", args=(number,))

    def finish(self) -> None:
        self._llm.collective_rpc("verl_finish_load")


class TransferIntake:
    """vLLM's own weight transfer, in the order that it prescribes: an update is started, gets its parts, is finished.

    Before a part is overwritten, vLLM has copied what it keeps for later: out of a device's slots (packed IPC) at once;
    what NCCL brings is memory of its own.
    """

    def __init__(self, llm: Any, setup: Mapping[str, Any], updates: Sequence[Mapping[str, Any]]) -> None:
        self._llm, self._setup, self._updates = llm, setup, updates
        llm.collective_rpc("verl_watch_loads")

    def join(self) -> None:
        self._llm.init_weight_transfer_engine({"init_info": self._setup})

    def begin(self) -> None:
        self._llm.collective_rpc("verl_expect_all")
        self._llm.start_weight_update()

    def take(self, number: int) -> None:
        self._llm.update_weights({"update_info": self._updates[number]})

    def finish(self) -> None:
        self._llm.finish_weight_update()
        self._llm.collective_rpc("verl_check_all")
