"""Event-driven model of rollout servers, a trainer and weight syncs; `pipeline.py` runs it. No GPU is used.

A server decodes its completions together, one token of each in a step, whose time depends on their number and on the
tokens in its cache. Prompts start and batches are taken by the rules of `megarl/rollout/bounded_staleness.py`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.preflight.roofline import DecodeSpeed

STEPS, WARM = 6, 3

Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]


@dataclass(frozen=True)
class Setup:
    """A run to simulate. Times are in seconds."""

    prompts: int  # of a batch
    samples: int  # of a prompt
    prompt_tokens: float
    lengths: Lengths
    speed: DecodeSpeed
    servers: int
    server_gpus: int  # of one server
    slots: int  # completions that a server decodes at once
    prefill_s: float  # of a token
    trainer_gpus: int
    train_s: float  # of a trained token: log-probs, update, communication
    sync_s: float
    swap_s: float = 0.0  # between sampling and training, and back: shared GPUs
    shared: bool = False
    staleness: int = 0
    drains: bool = True  # a server takes new weights only between its completions
    keeps_cache: bool = False  # pause_mode=in_place; retract computes the caches again
    score_s: float = 0.0  # of train_s, before the update: log-probs and values
    scores_beside: bool = False  # reshard.overlap_scoring: the next batch is scored while the servers receive weights

    @property
    def gpus(self) -> int:
        return self.trainer_gpus if self.shared else self.trainer_gpus + self.servers * self.server_gpus


@dataclass(frozen=True)
class Result:
    """Means over the measured steps."""

    step_s: float
    tokens_per_s: float  # trained, a GPU of all
    trainer_idle: float  # shares of the time
    server_idle: float
    sync_s: float  # from an update to the last server's weights; where servers drain, with their last completions
    exposed_s: float  # of it, for which the trainer waits
    oldest: int  # versions
    lost: int  # completion tokens sampled again after a server's death


@dataclass
class Server:
    """One rollout server. `clock` counts the decode steps of its completions."""

    at: float = 0.0  # time up to which it is worked out
    ready: float = 0.0  # it decodes from then on
    clock: float = 0.0
    cached: float = 0.0  # tokens
    busy: float = 0.0
    epoch: int = 0
    fresh: bool = True  # holds the newest weights
    alive: bool = True
    running: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (end, prompt, length)


class Simulation:
    """Servers, trainer and syncs as events in time; the rules of `megarl/rollout/bounded_staleness.py`."""

    def __init__(self, setup: Setup, seed: int = 0, deaths: tuple[tuple[float, int, float], ...] = ()) -> None:
        self.setup = setup
        self.rng = np.random.default_rng(seed)
        self.servers = [Server() for _ in range(setup.servers)]
        self.now, self.version, self.number = 0.0, 0, 0
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = itertools.count()
        self.waiting: deque[tuple[int, int]] = deque()  # samples (prompt, length) that any server may take
        self.held: deque[tuple[int, int]] = deque()  # those for servers with the newest weights
        self.open: dict[int, int] = {}  # prompt: samples under way
        self.started: dict[int, int] = {}  # prompt: version
        self.tokens: Counter[int] = Counter()  # prompt: tokens
        self.under_way: Counter[int] = Counter()  # version: prompts
        self.finished: list[tuple[int, int]] = []  # (version, prompt)
        self.handed, self.training, self.syncing = 0, False, False
        self.busy, self.updated, self.synced, self.exposed, self.oldest, self.lost = 0.0, 0.0, 0.0, 0.0, 0, 0
        self.scored: tuple[float, float] | None = None  # end of scoring beside a sync, and the batch's tokens
        self.steps: list[tuple[float, float]] = []  # (time, trained tokens)
        for when, server, back in deaths:
            self._at(when, "died", (server, back))

    def run(self, steps: int = STEPS, warm: int = WARM) -> Result:
        """Simulates `warm + steps` steps and returns the means of the last ones."""
        self._feed()
        marks: list[tuple[float, ...]] = []
        handlers: dict[str, Callable[[Any], None]] = {
            "ended": self._on_ended,
            "updated": self._on_updated,
            "synced": self._on_synced,
            "died": self._on_died,
            "back": self._on_back,
        }
        while len(self.steps) < warm + steps:
            self.now, _, kind, what = heapq.heappop(self.events)
            done = len(self.steps)
            handlers[kind](what)
            if len(self.steps) > done and len(self.steps) in (warm, warm + steps):
                for server in self.servers:
                    self._advance(server)
                busy = self.busy, sum(s.busy for s in self.servers)
                marks.append((self.now, *busy, self.synced, self.exposed))
        setup, (start, end) = self.setup, (marks[0] if warm else (0.0,) * 5, marks[-1])
        wall, trained, sampled, synced, exposed = (b - a for a, b in zip(start, end, strict=True))
        trainer, servers = trained / wall, sampled / wall / setup.servers
        if setup.shared:
            trainer = servers = trainer + servers
        tokens = sum(count for _, count in self.steps[warm:])
        return Result(
            wall / steps,
            tokens / wall / setup.gpus,
            max(0.0, 1 - trainer),
            max(0.0, 1 - servers),
            synced / steps,
            exposed / steps,
            self.oldest,
            self.lost,
        )

    def _at(self, when: float, kind: str, what: Any = None) -> None:
        heapq.heappush(self.events, (when, next(self.order), kind, what))

    # -- prompts --------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Starts prompts up to the bound: (h + 1) batches between start and trainer, less what was handed out."""
        setup = self.setup
        room = (setup.staleness + 1) * setup.prompts - self.handed
        room -= sum(self.under_way.values()) + len(self.finished)
        version = self.version + self.syncing
        lengths = self.setup.lengths(self.rng, max(0, room) * setup.samples)
        queue = self.held if self.syncing else self.waiting
        for first in range(0, len(lengths), setup.samples):
            prompt, self.number = self.number, self.number + 1
            self.open[prompt], self.started[prompt] = setup.samples, version
            self.under_way[version] += 1
            queue.extend((prompt, int(length)) for length in lengths[first : first + setup.samples])
        self._fill()

    def _fill(self) -> None:
        """Hands waiting samples to the servers with the fewest completions, one at a time."""
        free = [
            (len(s.running), i) for i, s in enumerate(self.servers) if s.alive and len(s.running) < self.setup.slots
        ]
        heapq.heapify(free)
        touched = set()
        while free:
            count, index = heapq.heappop(free)
            server = self.servers[index]
            if index not in touched:
                self._advance(server)
            if self._take(server):
                touched.add(index)
                if count + 1 < self.setup.slots:
                    heapq.heappush(free, (count + 1, index))
        for index in touched:
            self._schedule(index)

    def _take(self, server: Server) -> bool:
        """Gives a sample to a server that is worked out up to now; False if there is none for it."""
        queue = self.waiting or (self.held if server.fresh else self.waiting)
        if not queue or not server.alive:
            return False
        prompt, length = queue.popleft()
        heapq.heappush(server.running, (server.clock + length, prompt, length))
        server.cached += self.setup.prompt_tokens
        prefill = self.setup.prompt_tokens * self.setup.prefill_s / self.setup.samples
        server.ready = max(server.ready, self.now) + prefill
        server.busy += prefill
        return True

    # -- servers --------------------------------------------------------------------------------------------------

    def _advance(self, server: Server) -> None:
        """Decodes up to now, which is before the server's next completion ends."""
        start = max(server.at, server.ready)
        if server.running and self.now > start:
            count, left = len(server.running), server.running[0][0] - server.clock
            whole = left * self.setup.speed.step(count, server.cached + count * left / 2)
            done = left * min(1.0, (self.now - start) / whole) if whole else left
            server.clock += done
            server.cached += count * done
            server.busy += self.now - start
        server.at = max(server.at, self.now)

    def _schedule(self, index: int) -> None:
        server = self.servers[index]
        server.epoch += 1
        if server.running:
            count, left = len(server.running), max(0.0, server.running[0][0] - server.clock)
            seconds = left * self.setup.speed.step(count, server.cached + count * left / 2)
            self._at(max(self.now, server.ready) + seconds, "ended", (index, server.epoch))

    def _on_ended(self, what: tuple[int, int]) -> None:
        index, epoch = what
        server = self.servers[index]
        if epoch != server.epoch:
            return
        self._advance(server)
        server.clock, prompt, length = heapq.heappop(server.running)
        server.cached = max(0.0, server.cached - self.setup.prompt_tokens - length)
        self.open[prompt] -= 1
        self.tokens[prompt] += length
        if not self.open[prompt]:
            del self.open[prompt]
            version = self.started.pop(prompt)
            self.under_way[version] -= 1
            self.finished.append((version, prompt))
            self._train()
        self._take(server)
        self._schedule(index)
        if self.syncing and not server.running and not server.fresh:
            self._at(self.now + self.setup.sync_s, "synced", index)

    def _on_died(self, what: tuple[int, float]) -> None:
        index, seconds = what
        server = self.servers[index]
        self._advance(server)
        self.lost += round(sum(length - (end - server.clock) for end, _, length in server.running))
        self.waiting.extendleft((prompt, length) for _, prompt, length in server.running)
        if self.syncing and not server.fresh and server.running:
            self._at(self.now + self.setup.sync_s, "synced", index)
        server.running, server.cached, server.alive = [], 0.0, False
        self._schedule(index)
        self._at(self.now + seconds, "back", index)
        self._fill()

    def _on_back(self, index: int) -> None:
        server = self.servers[index]
        server.alive, server.fresh, server.at = True, True, self.now
        self._fill()

    # -- trainer and syncs ----------------------------------------------------------------------------------------

    def _complete(self, trained: int) -> bool:
        """True if enough prompts finished for version `trained`, and every prompt that must not grow older."""
        batch = self.setup.prompts
        if len(self.finished) < batch:
            return False
        done = Counter(version for version, _ in self.finished)
        if not sum(self.under_way.values()):
            return True
        for version in {*done, *(v for v, count in self.under_way.items() if count)}:
            may_stay = max(0, (version + self.setup.staleness - trained) * batch)
            finished = sum(count for v, count in done.items() if v <= version)
            awaited = sum(count for v, count in self.under_way.items() if v <= version)
            if awaited and finished + awaited - may_stay > min(finished, batch):
                return False
        return True

    def _train(self) -> None:
        """Starts training if a batch is complete and the trainer is free."""
        if self.training or self.syncing or not self._complete(self.version):
            return
        tokens = self._take_batch(self.version)
        self._at(self.now + self.setup.swap_s + tokens * self.setup.train_s, "updated", tokens)

    def _score_beside(self) -> None:
        """Scores the next batch beside the sync that has begun, if it is complete: else the trainer waits for both."""
        if self.setup.scores_beside and self._complete(self.version + 1):
            tokens = self._take_batch(self.version + 1)
            self.scored = self.now + tokens * self.setup.score_s, tokens

    def _take_batch(self, version: int) -> float:
        """Takes the oldest prompts for the trainer. Returns their tokens."""
        self.finished.sort()
        batch, self.finished = self.finished[: self.setup.prompts], self.finished[self.setup.prompts :]
        self.handed += len(batch)
        self.oldest = max(self.oldest, version - batch[0][0])
        completions = sum(self.tokens.pop(prompt) for _, prompt in batch)
        tokens = completions + len(batch) * self.setup.samples * self.setup.prompt_tokens
        self.training = True
        return tokens

    def _on_updated(self, tokens: float) -> None:
        """Begins the sync: at once on all servers, or on each after its last completion."""
        self.training, self.syncing, self.updated = False, True, self.now
        self.busy += tokens * self.setup.train_s
        self.steps.append((self.now, tokens))
        sync_s = self.setup.sync_s + self.setup.swap_s
        for index, server in enumerate(self.servers):
            server.fresh = False
            if not self.setup.drains:
                self._advance(server)
                again = 0.0 if self.setup.keeps_cache else server.cached * self.setup.prefill_s
                server.ready = max(server.ready, self.now) + sync_s + again
                server.busy += again
                self._schedule(index)
            if not self.setup.drains or not server.running:
                self._at(self.now + sync_s, "synced", index)
        if self.setup.drains:
            self.handed -= self.setup.prompts  # room for the batch that fresh servers start on
            self._feed()
        self._score_beside()

    def _on_synced(self, index: int) -> None:
        server = self.servers[index]
        self._advance(server)
        server.fresh = True
        if not all(other.fresh for other in self.servers):
            self._fill_one(index)
            return
        scored, self.scored = self.scored, None
        waits_from = self.updated if scored is None else min(scored[0], self.now)
        self.synced, self.exposed = self.synced + self.now - self.updated, self.exposed + self.now - waits_from
        self.syncing, self.version = False, self.version + 1
        self.handed = 0 if scored is None else self.setup.prompts
        self.waiting.extend(self.held)
        self.held.clear()
        self._feed()
        if scored is None:
            self._train()
            return
        end, tokens = scored
        self._at(max(self.now, end) + tokens * (self.setup.train_s - self.setup.score_s), "updated", tokens)

    def _fill_one(self, index: int) -> None:
        server = self.servers[index]
        while len(server.running) < self.setup.slots and self._take(server):
            pass
        self._schedule(index)
