"""Who sends what to whom, counted by hand."""

from collections import Counter
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.advice import job_of, shape
from verl.advise.traffic import HandOver, between_nodes, hand_overs, weight_load
from verl.config import AdvantageEstimator, AlgorithmConfig, DataConfig, KLControlConfig, PPOConfig, RolloutConfig
from verl.flow import wire
from verl.flow.batch import Rows

CONFIG = PPOConfig(
    data=DataConfig(train_batch_size=4, max_prompt_length=10, max_response_length=20), rollout=RolloutConfig(n=2)
)
SPLIT = """
actor: {devices: [0-1]}
critic: {devices: [2]}
reference: {devices: [2]}
reward: {devices: [2]}
rollout: {devices: [3]}
"""


def ways(steps: list[HandOver]) -> list[tuple[str, tuple[str, ...], list[tuple[int, int, int]]]]:
    return [(step.source, step.targets, [(m.src, m.dst, m.rows) for m in step.messages]) for step in steps]


def test_the_hand_overs_of_a_step():
    steps = hand_overs(job_of(SPLIT), CONFIG)
    assert ways(steps) == [
        ("rollout", ("actor", "critic", "reference", "reward"), [(3, 0, 4), (3, 1, 4), (3, 2, 8)]),
        ("actor", ("critic",), [(0, 2, 4), (1, 2, 4)]),
        ("reference", ("critic",), []),  # the same rank
        ("reward", ("critic",), []),
        ("reference", ("actor",), [(2, 0, 4), (2, 1, 4)]),
        ("critic", ("actor",), [(2, 0, 4), (2, 1, 4)]),
        ("reward", ("actor",), [(2, 0, 4), (2, 1, 4)]),
    ]
    assert steps[0].columns == ("prompt_ids", "response_ids", "rollout_logprobs", "ended", "weight", "version")
    assert steps[5].columns == ("values", "advantages", "returns")


def test_the_engines_log_probs_are_sent_once():
    config = replace(CONFIG, algorithm=AlgorithmConfig(recompute_old_logprobs=False))
    assert [step for step in hand_overs(job_of(SPLIT), CONFIG) if step.source != "actor"] == hand_overs(
        job_of(SPLIT), config
    )


def test_one_process_sends_nothing():
    text = "actor: {devices: [0]}\ncritic: {devices: [0]}\nrollout: {devices: [0]}"
    assert all(step.messages == () for step in hand_overs(job_of(text), CONFIG))


def test_without_critic_and_reference():
    config = PPOConfig(
        data=CONFIG.data,
        rollout=RolloutConfig(n=2),
        algorithm=AlgorithmConfig(adv_estimator=AdvantageEstimator.grpo, kl_ctrl=KLControlConfig(kl_coef=0.0)),
    )
    steps = hand_overs(job_of("actor: {devices: [0]}\nrollout: {devices: [1]}", config=config), config)
    assert ways(steps) == [("rollout", ("actor", "reward"), [(1, 0, 8)]), ("reward", ("actor",), [(1, 0, 8)])]


def test_bytes_are_those_of_the_runs_own_messages():
    """Rows of the greatest length, packed as the exchange packs them."""
    steps = hand_overs(job_of(SPLIT), CONFIG)

    def packed(rows: int) -> int:
        columns = [
            Rows.ragged([[0] * 10] * rows, torch.int64),
            Rows.ragged([[0] * 20] * rows, torch.int64),
            Rows.ragged([[0.0] * 20] * rows, torch.float32),
            Rows.scalars([True] * rows, torch.bool),
            Rows.scalars([1.0] * rows, torch.float32),
            Rows.scalars([1] * rows, torch.int64),
        ]
        return sum(part.numel() for part in wire.pack(7, columns))

    assert [m.size for m in steps[0].messages] == [packed(4), packed(4), packed(8)]
    values = [Rows.ragged([[0.0] * 20] * 4, torch.float32)] * 3
    assert steps[5].messages[0].size == sum(part.numel() for part in wire.pack(7, values))


def test_weights_are_written_where_they_are_and_sent_where_they_are_not():
    model = shape()
    text = """
    actor: {devices: ["a:0-1"]}
    rollout: {devices: ["a:1", "b:0-1"]}
    """
    job = job_of(text)
    load = weight_load(job, model, CONFIG, itemsize=2)
    whole = 2 * model.num_elements
    assert {(domain.members, domain.readers) for domain in load.domains} == {((0, 1), (1,)), ((2, 3), (2, 3))}
    assert sum(m.size for m in load.written) == whole  # into the memory of node a, by the ranks that hold it
    assert sum(m.size for m in load.sent) == between_nodes(job, load.sent) == whole  # once to b, for both replicas
    assert {m.src for m in load.sent} == {0, 1} and {m.dst for m in load.sent} <= {2, 3}


def test_in_process_engines_have_memory_of_their_own():
    model, text = shape(), "actor: {devices: [0]}\nrollout: {devices: [0-2], backend: torch}"
    load = weight_load(job_of(text), model, CONFIG, itemsize=4)
    assert [(m.src, m.dst, m.size) for m in load.written] == [(0, 0, 4 * model.num_elements)]
    received = Counter[int]()
    for message in load.sent:
        received[message.dst] += message.size
    assert received == {1: 4 * model.num_elements, 2: 4 * model.num_elements}


def test_tensor_parallel_engines_in_the_ranks_have_their_parts_alone():
    """The actor's TP 2 and the rollout's on the same devices: every rank has what it generates with."""
    text = "actor: {devices: [0, 1], parallelism: {tensor_parallel_size: 2}}\n"
    job = job_of(text + "rollout: {devices: [0, 1], tensor_parallel_size: 2, backend: torch}")
    load = weight_load(job, shape(), CONFIG, itemsize=4)
    assert load.sent == () and len(load.domains) == 2
    assert all(m.size < 4 * shape().num_elements for m in load.written)


def test_vllms_own_ways_bring_whole_buckets_to_devices():
    """IPC: to each device of the rollout. NCCL: to the first of the actor that generates nothing."""
    whole = 2 * shape().num_elements
    job = job_of("actor: {devices: [0-2]}\nrollout: {devices: [0, 3]}")
    load = weight_load(job, shape(), replace(CONFIG, rollout=RolloutConfig(weight_transfer="ipc")), itemsize=2)
    assert [domain.readers for domain in load.domains] == [(0,), (3,)]
    assert sum(m.size for m in load.sent if m.dst == 3) == whole
    assert sum(m.size for m in [*load.sent, *load.written] if m.dst == 0) == whole
    load = weight_load(job, shape(), replace(CONFIG, rollout=RolloutConfig(weight_transfer="nccl")), itemsize=2)
    assert [domain.readers for domain in load.domains] == [(1,)]
    assert sum(m.size for m in [*load.sent, *load.written] if m.dst == 1) == whole


def test_two_buckets_are_two_of_the_largest():
    """The setting where blocks are smaller, else two of the largest block: here the embedding."""
    job = job_of("actor: {devices: [0]}\nrollout: {devices: [1]}")
    large = shape(vocab_size=40_000)
    config = replace(CONFIG, rollout=RolloutConfig(reshard_bucket_mib=1))
    assert weight_load(job, large, config, itemsize=2).two_buckets == 2 * 40_000 * 48 * 2
    assert weight_load(job, shape(), config, itemsize=2).two_buckets <= 2 << 20


@given(
    st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (3, 1, 1), (2, 2, 2), (1, 3, 1)]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_every_memory_gets_every_weight_once(degrees: tuple[int, int, int], tied: bool, apart: bool):
    pp, dp, tp = degrees
    count, model = pp * dp * tp, shape(tie_word_embeddings=tied)
    rollout = f'"b:0-1", "a:{count}"' if apart else '"a:0", "b:0"'
    text = (
        f'actor: {{devices: ["a:0-{count - 1}"], '
        f"parallelism: {{tensor_parallel_size: {tp}, pipeline_parallel_size: {pp}}}}}\n"
        f"rollout: {{devices: [{rollout}]}}"
    )
    load = weight_load(job_of(text), model, CONFIG, itemsize=2)
    assert sum(m.size for m in [*load.sent, *load.written]) == len(load.domains) * 2 * model.num_elements
