"""A server rank's groups with ranks of other servers, over which relays send weights on."""

from __future__ import annotations

from torch.distributed import PrefixStore, Store

from megarl.reshard.plan.relay import pairs_in_turn
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.sync.attempt import AttemptSpec
from megarl.reshard.transfer.shard_transfer import Relays, Route, TransferError
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports import transport_named
from megarl.reshard.transfer.transports.base import PlainStaging, Staging, Transport

SENDER, RECEIVER = 0, 1  # ranks of a group: a relay and a rank that it sends to
Member = tuple[int, int, int]  # server index, server epoch, rank within the server


class RelayGroups:
    """Groups of two ranks each. A group is kept between syncs while the plan pairs the same two ranks.

    A pair is joined and left by both of its ranks in the same attempts, as all ranks make the same plan.
    """

    def __init__(self, store: Store, address: str):
        self.store = store
        self.address = address
        self._groups: dict[tuple[Member, Member], Transport] = {}
        self._staging: Staging = PlainStaging(0)

    def join(
        self, plan: TransferPlan, number: int, attempt_number: int, spec: AttemptSpec, receiving: Staging
    ) -> Relays:
        """Joins the groups that the plan needs of destination rank `number`, and leaves others.

        The rank receives into `receiving`; it gets staging of its own to send from if it is a relay.

        Raises:
            TransferError: names a rank that did not join within the time to connect.
        """
        deadline = Deadline(spec.relays_connect_s)
        members = {n: (server.index, server.epoch, rank) for n, server, rank in spec.server_ranks()}
        transport_of = {n: transport_named(server.transport_name) for n, server, _ in spec.server_ranks()}
        pairs = [pair for pair in pairs_in_turn(plan.messages) if number in pair]
        wanted = {(members[relay], members[destination]) for relay, destination in pairs}
        for pair in [pair for pair in self._groups if pair not in wanted]:
            self._groups.pop(pair).abort()
        sources: dict[int, Route] = {}
        targets: dict[int, Route] = {}
        for relay, destination in pairs:
            peer, own = (destination, SENDER) if relay == number else (relay, RECEIVER)
            index, _, rank = members[peer]
            name = f"rank {rank} of server {index}"
            if own == SENDER and not self._staging.slots[0].numel():
                self._staging = transport_of[number].make_staging(spec.bucket_bytes)
            pair = members[relay], members[destination]
            if pair not in self._groups:
                store = PrefixStore(f"relay/{attempt_number}/{relay}/{destination}", self.store)
                staging = self._staging if own == SENDER else receiving
                try:
                    self._groups[pair] = transport_of[number](store, self.address, own, 2, deadline.left(), staging)
                    _greet(self._groups[pair], own, deadline)
                except (RuntimeError, OSError) as error:
                    raise TransferError(f"{name} did not connect: {error}", peer=name, tensor="") from error
            (targets if own == SENDER else sources)[peer] = Route(name, self._groups[pair], 1 - own)
        return Relays(sources, targets, self._staging)

    def leave(self) -> None:
        """Ends the connections and frees the staging memory."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
        self._staging.close()


def _greet(group: Transport, own: int, deadline: Deadline) -> None:
    """Sends a byte to the receiver. NCCL connects a pair at its first message, and must do so in the pairs' order."""
    if own == SENDER:
        group.send(0, 1, RECEIVER, 0).wait(deadline)
    else:
        message = group.receive(0, 1, SENDER, 0)
        message.wait(deadline)
        message.release()
