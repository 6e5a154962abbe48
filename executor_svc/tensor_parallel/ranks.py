"""Who is in the group, and the group's connections.

A rank learns its place from the environment that torchrun and `launcher.py` set: RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from executor_svc.errors import DeviceLost, StartupError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

START_SECONDS = 300.0
"""How long ranks wait for one another to come."""

LEAST_SECONDS = 5.0
"""To connect takes its time, too."""

LOAD_SECONDS = 7200.0
"""How long a rank may be later than the others with a share of the weights."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many this process is, of all and of those on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks gRPC."""
        return self.rank == 0


def read_place(environ: Mapping[str, str], wanted_size: int) -> Place | None:
    """The place that torchrun gave this process; None if it runs alone.

    Args:
        environ: the process's environment.
        wanted_size: --tensor-parallel-size.

    Raises:
        StartupError: if the environment is broken, or names another number of ranks.
    """
    if "RANK" not in environ or environ.get("WORLD_SIZE", "1") == "1":
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, size, local_rank, local_size = (int(environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise StartupError(
            f"the environment of torchrun is incomplete ({error}); it sets {', '.join(names)}"
        ) from None
    if not 0 <= rank < size or not 0 <= local_rank < local_size <= size:
        raise StartupError(f"RANK {rank} of {size}, LOCAL_RANK {local_rank} of {local_size}")
    if wanted_size not in (1, size):
        raise StartupError(
            f"--tensor-parallel-size is {wanted_size}, but torchrun started {size} ranks"
        )
    return Place(rank, size, local_rank, local_size)


class Ranks:
    """The group, once all have come.

    Attributes:
        place: of this process.
    """

    def __init__(self, place: Place) -> None:
        """See `join`."""
        self.place = place
        self._control: torch.distributed.ProcessGroup | None = None

    @classmethod
    def join(cls, place: Place, device_type: str) -> Ranks:
        """Meet the other ranks; afterwards torch.distributed's default group is theirs.

        Args:
            place: of this process.
            device_type: "cpu" or "cuda", where weights and pool will be.

        Raises:
            StartupError: if they do not come within START_SECONDS.
        """
        import torch
        from torch import distributed

        ranks = cls(place)
        device = None
        if device_type == "cuda":
            device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(device)
        try:
            distributed.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                store=_meet(place),
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=LOAD_SECONDS),
                device_id=device,
            )
            ranks._control = ranks.new_group(LOAD_SECONDS)
        except (RuntimeError, ValueError, DeviceLost) as error:
            raise StartupError(
                f"rank {place.rank} of {place.size} did not meet the others: {one_line(error)}"
            ) from error
        return ranks

    def device(self, wanted: str) -> str:
        """The device of this rank.

        Args:
            wanted: --device, which `sharing.check_shareable` did not refuse.
        """
        if choose_device_type(wanted) == "cpu":
            return "cpu"
        return f"cuda:{self.place.local_rank}"

    def new_group(self, seconds: float) -> torch.distributed.ProcessGroup:
        """A group of all ranks on the host, whose calls wait so many seconds at most.

        Raises:
            DeviceLost: if another rank is gone.
        """
        from torch import distributed

        timeout = timedelta(seconds=max(seconds, LEAST_SECONDS))
        try:
            group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise lost(error) from error
        return group

    def least(self, number: int) -> int:
        """The least of all ranks' numbers.

        Raises:
            DeviceLost: if another rank is gone.
        """
        import torch
        from torch import distributed

        least = torch.tensor([number], dtype=torch.int64)
        try:
            distributed.all_reduce(least, distributed.ReduceOp.MIN, group=self._control)
        except RuntimeError as error:
            raise lost(error) from error
        return int(least)

    def require_same(self, what: str, text: str) -> None:
        """Refuse ranks that were started with something else.

        Args:
            what: for the error.
            text: to be the same in all ranks.

        Raises:
            StartupError: if it is not.
            DeviceLost: if another rank is gone.
        """
        texts = self.gather(text.encode())
        others = [rank for rank, other in enumerate(texts) if other != texts[0]]
        if others:
            first = others[0]
            raise StartupError(
                f"rank {first} has another {what} than rank 0: {texts[first].decode()} and "
                f"{texts[0].decode()}"
            )

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank.

        Raises:
            DeviceLost: if another rank is gone.
        """
        import torch
        from torch import distributed

        size = self.place.size
        try:
            mine = torch.tensor([len(data)], dtype=torch.int64)
            lengths = [torch.zeros_like(mine) for _ in range(size)]
            distributed.all_gather(lengths, mine, group=self._control)
            room = max(1, *(int(length) for length in lengths))
            padded = torch.zeros(room, dtype=torch.uint8)
            padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
                : len(data)
            ]
            all_data = [torch.zeros_like(padded) for _ in range(size)]
            distributed.all_gather(all_data, padded, group=self._control)
        except RuntimeError as error:
            raise lost(error) from error
        pairs = zip(all_data, lengths, strict=True)
        return [bytes(line[: int(length)].numpy()) for line, length in pairs]

    def broadcast(self, tensor: Tensor) -> None:
        """Give the others what stands in rank 0's, device to device.

        Raises:
            DeviceLost: if another rank is gone.
        """
        from torch import distributed

        try:
            distributed.broadcast(tensor, src=0)
        except RuntimeError as error:
            raise lost(error) from error


def _meet(place: Place) -> Any:
    """The store (torch.distributed.Store) that all ranks share, once all of them have come.

    Raises:
        RuntimeError: if they do not within START_SECONDS.
    """
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=START_SECONDS)
    store, _, _ = next(iter(rendezvous("env://", place.rank, place.size, timeout=timeout)))
    names = [f"octavo/rank/{rank}" for rank in range(place.size)]
    store.set(names[place.rank], "here")
    store.wait(names, timeout)
    return store


def choose_device_type(wanted: str) -> str:
    """Where ranks put their shares: "cuda" or "cpu".

    Args:
        wanted: --device.
    """
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted).type


def sum_over_ranks(tensor: Tensor) -> None:
    """Add up all ranks' tensors, in place."""
    from torch import distributed

    distributed.all_reduce(tensor)


def concatenate_over_ranks(tensor: Tensor) -> Tensor:
    """All ranks' columns side by side.

    Args:
        tensor: [rows, columns], as many columns in every rank.
    Returns: [rows, ranks * columns].
    """
    import torch
    from torch import distributed

    shape = (distributed.get_world_size(), *tensor.shape)
    gathered = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    distributed.all_gather(list(gathered.unbind()), tensor.contiguous())
    return gathered.movedim(0, 1).flatten(1)


def lost(error: Exception) -> DeviceLost:
    """What it means that a call to the other ranks failed."""
    return DeviceLost(f"another rank of this executor is gone: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
