"""Micro-batches through the stages of a pipeline: 1F1B over micro-batches of any shapes, and forward alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.signs import Signs
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
        self,
        parts: Sequence[HeadedModel],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        around: Around,
        stage_peers: Sequence[int],
    ) -> None:
        """`parts`: this stage's, several where stages are interleaved. `group`: the stages in their order.

        `dtype`: of hidden states and their gradients. `stage_peers`: the other ranks of this stage.
        """
        self._parts, self._group, self._dtype, self._around = parts, group, dtype, around
        self._stage_peers = stage_peers
        self._stage, self._num_stages = dist.get_rank(group), group.size()
        self._turn = 0
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
            if made.requires_grad:  # else nothing before it is trained: a frozen embedding
                torch.autograd.backward(made, gradient)
            return None if states is None else states.grad

        return self._run(batches, True, {Kind.forward: forward, Kind.backward: backward})

    def _run(self, batches: Sequence[MicroBatch], training: bool, do: Mapping[Kind, Do]) -> Idle:
        clock, signs = IdleClock(self._around.device), self._around.signs
        messages = _Messages(self._group, len(self._parts), clock, signs, lambda number: self._buffer(batches[number]))
        for tick in timeline(self._num_stages, len(batches), len(self._parts), training):
            made, action = None, tick[self._stage]
            if action is not None:
                sent = messages.take(action)
                self._turn += 1
                what = f"{action} of {len(batches)} on stage {self._stage}"
                with signs.doing(what, self._stage_peers, self._turn):
                    made = do[action.kind](action, sent)
            messages.exchange(tick, made)
        messages.finish()
        with clock.waiting(), signs.waiting(messages.others, "the other stages"):
            self._meet()  # a step is as long as its slowest stage's
        return clock.stop()

    def _buffer(self, batch: MicroBatch) -> Tensor:
        """For the hidden states of a micro-batch between two stages, or for their gradient."""
        part = self._parts[0]
        num_rows, time = batch.input_ids.shape
        share = time // part.time_shares
        hidden_size = part.hf.config.get_text_config().hidden_size
        return torch.empty(num_rows, share, hidden_size, dtype=self._dtype, device=self._around.device)

    def _meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._around.device), group=self._group)


@dataclass
class _Post:
    """A message on its way."""

    tensor: Tensor
    rank: int
    """At its other end."""
    what: str
    """Is awaited of that rank."""
    work: dist.Work | None = None


class _Messages:
    """Between neighbouring stages, in one pass.

    Messages of a tick are posted together and before those of the next, on both ends: NCCL tells messages between two
    ranks apart by their order alone, and takes them in that order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        virtual_stages: int,
        clock: IdleClock,
        signs: Signs,
        buffer: Callable[[int], Tensor],
    ) -> None:
        """`buffer`: makes one for what is sent of a micro-batch."""
        self._group, self._virtual_stages, self._clock, self._signs = group, virtual_stages, clock, signs
        self._buffer = buffer
        self._ranks = dist.get_process_group_ranks(group)
        self._stage = dist.get_rank(group)
        self.others = [rank for rank in self._ranks if rank != signs.rank]
        """The other stages'."""
        self._received: dict[Action, _Post] = {}
        self._sent: deque[_Post] = deque()

    def take(self, action: Action) -> Tensor | None:
        """What was sent for an action of this stage; None where nothing is: at the pipeline's two ends."""
        if action not in self._received:
            return None
        post = self._received.pop(action)
        self._wait(post)
        return post.tensor

    def exchange(self, tick: Sequence[Action | None], made: Tensor | None) -> None:
        """Posts the messages of a tick; `made`: what this stage's action made. Waits for none but old sends."""
        posts: list[tuple[_Post, Action | None, dist.P2POp]] = []
        for stage, action in enumerate(tick):
            following = None if action is None else after(action, stage, len(self._ranks), self._virtual_stages)
            if following is None or following[0] == stage:
                continue
            if following[0] == self._stage:
                post = _Post(self._buffer(following[1].micro_batch), self._ranks[stage], f"the {action}")
                op = dist.P2POp(dist.irecv, post.tensor, post.rank, self._group)
                posts.append((post, following[1], op))
            elif stage == self._stage:
                assert made is not None
                post = _Post(made.contiguous(), self._ranks[following[0]], f"the receipt of the {action}")
                posts.append((post, None, dist.P2POp(dist.isend, post.tensor, post.rank, self._group)))
        works = dist.batch_isend_irecv([op for _, _, op in posts]) if posts else []
        for number, (post, receiver, _) in enumerate(posts):
            post.work = works[min(number, len(works) - 1)]  # NCCL gives one for all
            if receiver is None:
                self._sent.append(post)
            else:
                self._received[receiver] = post
        self._let_go(len(self._ranks))

    def finish(self) -> None:
        assert not self._received
        self._let_go(0)

    def _let_go(self, num_kept: int) -> None:
        """Of what was sent but for the last messages. A tensor must stay until its receiver has it."""
        while len(self._sent) > num_kept:
            self._wait(self._sent.popleft())

    def _wait(self, post: _Post) -> None:
        assert post.work is not None
        with self._clock.waiting(), self._signs.waiting([post.rank], post.what):
            post.work.wait()
