"""Micro-batches through the stages of a pipeline: 1F1B over micro-batches of any shapes, and forward alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.model.heads import HeadedModel
from verl.model.packing import MicroBatch
from verl.parallel.idle import Idle, IdleClock
from verl.parallel.passes import Around, BatchLoss, Take
from verl.parallel.schedule import Action, Kind, after, timeline

Do = Callable[[Action, Tensor | None], Tensor | None]
"""Does an action on what was sent for it, and gives what the next part goes on with."""


class Pipelined:
    """Every stage has all micro-batches, and so knows the shape of whatever it receives: nothing is negotiated."""

    def __init__(
        self, parts: Sequence[HeadedModel], group: dist.ProcessGroup, dtype: torch.dtype, around: Around
    ) -> None:
        """`parts`: this stage's, several where stages are interleaved. `group`: the stages in their order.

        `dtype`: of hidden states and their gradients.
        """
        self._parts, self._group, self._dtype, self._around = parts, group, dtype, around
        self._stage, self._num_stages = dist.get_rank(group), group.size()
        self._meet()  # messages are between two, and NCCL wants all ranks of a group in its first operation

    def forward(self, batches: Sequence[MicroBatch], temperature: float, take: Take) -> None:
        def forward(action: Action, states: Tensor | None) -> Tensor | None:
            part, batch = self._parts[action.chunk], batches[action.micro_batch]
            made = part(batch.to(self._around.device), temperature, states)
            if not part.ends_with_head:
                return made
            take(made, batch)
            return None

        with torch.no_grad():
            self._run(batches, False, {Kind.forward: forward})

    def train(self, batches: Sequence[MicroBatch], temperature: float, loss: BatchLoss) -> Idle:
        live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

        def forward(action: Action, states: Tensor | None) -> Tensor:
            part, batch = self._parts[action.chunk], batches[action.micro_batch]
            if states is not None:
                states.requires_grad_()
            with self._around.activations():
                made = part(batch.to(self._around.device), temperature, states)
                made = loss(made, batch) if part.ends_with_head else made
            live[action.micro_batch, action.chunk] = states, made
            return made.detach()

        def backward(action: Action, gradient: Tensor | None) -> Tensor | None:
            states, made = live.pop((action.micro_batch, action.chunk))
            self._around.before_backward(self._parts[action.chunk], action.micro_batch == len(batches) - 1)
            torch.autograd.backward(made, gradient)
            return None if states is None else states.grad

        return self._run(batches, True, {Kind.forward: forward, Kind.backward: backward})

    def _run(self, batches: Sequence[MicroBatch], training: bool, do: Mapping[Kind, Do]) -> Idle:
        clock = IdleClock(self._around.device)
        messages = _Messages(self._group, len(self._parts), clock, lambda number: self._buffer(batches[number]))
        for tick in timeline(self._num_stages, len(batches), len(self._parts), training):
            made, action = None, tick[self._stage]
            if action is not None:
                made = do[action.kind](action, messages.take(action))
                self._around.beat()
            messages.exchange(tick, made)
        messages.finish()
        with clock.waiting():
            self._meet()  # a step is as long as its slowest stage's
        return clock.stop()

    def _buffer(self, batch: MicroBatch) -> Tensor:
        """For the hidden states of a micro-batch between two stages, or for their gradient."""
        part = self._parts[0]
        num_rows, time = batch.input_ids.shape
        share = time if part.peers is None else time // part.peers.size
        hidden_size = part.hf.config.get_text_config().hidden_size
        return torch.empty(num_rows, share, hidden_size, dtype=self._dtype, device=self._around.device)

    def _meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._around.device), group=self._group)


class _Messages:
    """Between neighbouring stages, in one pass.

    Messages of a tick are posted together and before those of the next, on both ends: NCCL tells messages between two
    ranks apart by their order alone, and takes them in that order.
    """

    def __init__(
        self, group: dist.ProcessGroup, virtual_stages: int, clock: IdleClock, buffer: Callable[[int], Tensor]
    ) -> None:
        """`buffer`: makes one for what is sent of a micro-batch."""
        self._group, self._virtual_stages, self._clock, self._buffer = group, virtual_stages, clock, buffer
        self._ranks = dist.get_process_group_ranks(group)
        self._stage = dist.get_rank(group)
        self._received: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def take(self, action: Action) -> Tensor | None:
        """What was sent for an action of this stage; None where nothing is: at the pipeline's two ends."""
        if action not in self._received:
            return None
        tensor, work = self._received.pop(action)
        with self._clock.waiting():
            work.wait()
        return tensor

    def exchange(self, tick: Sequence[Action | None], made: Tensor | None) -> None:
        """Posts the messages of a tick; `made`: what this stage's action made. Waits for none but old sends."""
        posts: list[tuple[Tensor, Action | None, dist.P2POp]] = []
        for stage, action in enumerate(tick):
            following = None if action is None else after(action, stage, len(self._ranks), self._virtual_stages)
            if following is None or following[0] == stage:
                continue
            if following[0] == self._stage:
                tensor = self._buffer(following[1].micro_batch)
                op = dist.P2POp(dist.irecv, tensor, self._ranks[stage], self._group)
                posts.append((tensor, following[1], op))
            elif stage == self._stage:
                assert made is not None
                tensor = made.contiguous()
                posts.append((tensor, None, dist.P2POp(dist.isend, tensor, self._ranks[following[0]], self._group)))
        works = dist.batch_isend_irecv([op for _, _, op in posts]) if posts else []
        for number, (tensor, receiver, _) in enumerate(posts):
            work = works[min(number, len(works) - 1)]  # NCCL gives one for all
            if receiver is None:
                self._sent.append((tensor, work))
            else:
                self._received[receiver] = tensor, work
        self._let_go(len(self._ranks))

    def finish(self) -> None:
        assert not self._received
        self._let_go(0)

    def _let_go(self, num_kept: int) -> None:
        """Of what was sent but for the last messages. A tensor must stay until its receiver has it."""
        while len(self._sent) > num_kept:
            _, work = self._sent.popleft()
            with self._clock.waiting():
                work.wait()
