"""The numbers each worker keeps in shared memory: one row a worker, one writer a row.

All are sums since the worker's first start (a restarted worker goes on with its row), so that a
reader needs no lock: it takes differences between two looks.
"""

from __future__ import annotations

from enum import IntEnum

STALENESS_BINS = 64  # last bin: this or more


class Counter(IntEnum):
    """Index of each number in a worker's row of float64."""

    # life
    BEAT = 0  # grows with every environment step: the heartbeat
    PHASE = 1  # what the worker is doing now: see Phase
    INCARNATION = 2
    PULLED = 3  # version the worker computes from
    PAUSED = 4  # last pause request it has obeyed
    ACTIVE = 5  # 1 while it takes part (the `sync` rule waits for active workers only)
    OFFERED = 6  # tick + 1 of the round its gradient is offered to (`sync`)
    CLOCK = 7  # `server`: gradients of it that were applied, begun at the slowest worker's when it joins
    # work
    ROLLOUTS = 8
    STEPS = 9  # environment steps, reset rows not counted
    UPDATES = 10  # versions this worker's pushes made or took part in
    EPISODES = 11
    NONFINITE = 12  # gradients dropped because of NaN or Inf
    NONFINITE_IN_A_ROW = 13
    ENV_FAILURES = 14
    BYTES = 15  # copied between the store and the worker
    BYTES_DOWN = 30  # weights the worker has received
    BYTES_UP = 31  # gradients the worker has sent, as they were sent
    # time, seconds
    T_COLLECT = 16
    T_GRADIENT = 17
    T_PULL = 18
    T_WAIT = 19  # for the lock, or for the other workers in `sync`
    T_APPLY = 20
    T_BLOCKED = 21  # share of T_WAIT spent on other workers (`sync`, `server`) rather than on the lock
    T_IDLE = 22  # the server: time with nothing to apply
    # reads of the store
    READS = 24
    READ_RETRIES = 25  # read again because writers lapped the reader
    READS_OVERLAPPED = 26  # hogwild: reads during which another worker was writing
    READS_BAD = 27  # --check-reads: reads whose checksum did not match
    # in-place writes (hogwild)
    WRITES_BEGUN = 28
    WRITES_DONE = 29
    # sums over rollouts; divide by LEARNED
    LEARNED = 32
    LOSS = 33
    POLICY_LOSS = 34
    VALUE_LOSS = 35
    ENTROPY = 36
    GRADIENT_NORM = 37  # before clipping
    GRADIENT_NORM_CLIPPED = 38  # after clipping
    CLIPPED = 39  # rollouts whose gradient was clipped
    EXPLAINED_VARIANCE = 40
    LEARNING_RATE = 41
    STALENESS = 42
    STALENESS_MAX = 43
    KL = 44  # PPO: how far the policy has moved since the rollout was collected
    CLIP_FRACTION = 45  # PPO: rows whose ratio is outside the clip range
    DROPPED_STALE = 46  # `server`: gradients dropped as too old
    DUPLICATES = 47  # `server`: messages that came again and were not applied again
    # finished episodes are in a ring; how many were ever written
    EPISODE_HEAD = 48
    HISTOGRAM = 64  # STALENESS_BINS numbers from here on


ROW = Counter.HISTOGRAM + STALENESS_BINS
RING = 4096  # finished episodes kept until the parent has looked


class Phase(IntEnum):
    """What a worker is doing; tells a worker that waits from one that hangs."""

    STARTING = 0
    COLLECT = 1
    GRADIENT = 2
    WAIT = 3
    APPLY = 4
    PAUSED = 5
    LEFT = 6
