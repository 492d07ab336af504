"""What the probes hand to the outside: frozen records, and nothing else.

A report is plain data. It holds no tensor, no frame and no exception, so it can be kept, pickled and sent
to another process. It imports neither torch nor IPython; pandas and the renderers only when asked.

Units everywhere: bytes are ints, times float seconds, percent floats from 0 to 100, devices strings such as
``"cuda:1"``. A figure that could not be had is ``None``, and the reason is in the row's ``reasons`` under the
field's name, or in the report's ``notes``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

if TYPE_CHECKING:
    import pandas as pd

Row = TypeVar("Row")


class Report(Generic[Row]):
    """A sequence of rows that shows itself in a notebook and a terminal, and becomes a DataFrame or JSON."""

    __slots__ = ()
    row_type: ClassVar[type[Any]]
    """The dataclass of one row; its fields are the columns of `to_pandas`."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, in the order in which they are shown."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __bool__(self) -> bool:
        return True  # a report without rows is an answer too: `if report` must not mean `if rows`

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a record with raw numbers; the columns are the same whatever was found.

        A figure that is absent is NaN, also where no row has it, so that columns of figures are always numbers.
        """
        import pandas as pd

        columns = dataclasses.fields(self.row_type)
        records = [[getattr(row, column.name) for column in columns] for row in self.rows]
        frame: pd.DataFrame = pd.DataFrame(records, columns=[column.name for column in columns])
        for column in columns:
            if column.type in _FIGURES and frame[column.name].dtype == object:
                frame[column.name] = frame[column.name].astype("float64")
        return frame

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON-ready data: dicts, lists, strings, numbers and None."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain

    def __str__(self) -> str:
        from gpumagic.render import to_text

        return to_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gpumagic.render import to_html

        return to_html(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


_FIGURES = ("int", "float", "int | None", "float | None")


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


# -- %gpuinfo ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process on one device, as the driver reports it."""

    pid: int | None
    """The process id, or None where the driver's number means nothing here (a container)."""
    name: str | None
    user: str | None
    memory: int | None
    """Bytes of device memory the driver charges to it; None where it does not say (WDDM, WSL)."""
    this_kernel: bool = False
    kind: str = "compute"
    """``"compute"`` or ``"graphics"``."""
    utilization: float | None = None
    """Percent of the last second in which its kernels ran, where the driver has a sample; read with ``processes``."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One device: what the driver knows of it, joined with what this kernel's torch holds on it."""

    device: str | None
    """Torch's name in this process, such as ``"cuda:1"``; None if torch cannot use it."""
    nvml_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    memory_reserved: int | None = None
    """Bytes the driver keeps for itself (NVML v2's ``reserved``); not part of torch's "reserved"."""
    kernel_allocated: int | None = None
    """Bytes in live tensors of this process, by torch's allocator."""
    kernel_reserved: int | None = None
    """Bytes torch's allocator took from the driver, allocated or cached."""
    other_processes: int | None = None
    """Bytes the driver charges to processes other than this kernel."""
    utilization: float | None = None
    """Percent of the last sample period in which any kernel ran; 100 does not mean full."""
    temperature: float | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    """Watts."""
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clocks are held down, in words; empty when they are not."""
    processes: tuple[ProcessRow, ...] | None = None
    bus_id: str | None = None
    performance_state: str | None = None
    """``"P0"`` (fastest) to ``"P15"``."""
    fan: float | None = None
    """Percent."""
    clock_sm: int | None = None
    """MHz."""
    clock_sm_max: int | None = None
    clock_memory: int | None = None
    clock_memory_max: int | None = None
    compute_capability: str | None = None
    memory_utilization: float | None = None
    """Percent of the last sample period in which memory was read or written: bandwidth, not occupancy."""
    encoder_utilization: float | None = None
    decoder_utilization: float | None = None
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    """Lanes."""
    pcie_width_max: int | None = None
    pcie_sent: int | None = None
    """Bytes a second from the device to the host, over 20 ms."""
    pcie_received: int | None = None
    nvlinks: int | None = None
    """NVLinks that are up."""
    nvlink_sent: int | None = None
    """Bytes a second over all NVLinks while the report was made."""
    nvlink_received: int | None = None
    topology: Mapping[str, str] | None = None
    """How each other GPU is reached, such as ``"NVLink"``, by NVML index."""
    unified: bool = False
    """True where the device has no memory of its own: ``memory_total`` and ``memory_free`` are then the host's, and
    ``memory_used`` is what the driver charges to processes on it."""
    predicted: bool = False
    """True where ``device`` was inferred from the environment and CUDA may number differently."""
    simulated: bool = False
    """True for a simgpu device: host memory that plays a GPU."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a field is None, by field name."""


@dataclass(frozen=True, repr=False)
class GPUReport(Report[GpuRow]):
    """The GPUs of this machine and this kernel's part in them, at one moment."""

    row_type: ClassVar[type[Any]] = GpuRow

    devices: tuple[GpuRow, ...]
    torch_version: str | None = None
    """None if torch is not installed."""
    cuda_build: str | None = None
    """CUDA (or ROCm) version torch was built with; None for a CPU-only build."""
    driver_version: str | None = None
    cuda_visible_devices: str | None = None
    """The environment variable as this process has it; None if it is not set."""
    best: str | None = None
    """The torch device with most free memory, usable as ``%%ondevice auto``."""
    cause: str | None = None
    """Why there is no GPU, with the remedy, in one sentence; None if there is one."""
    show_processes: bool = False
    show_all: bool = False
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[GpuRow, ...]:
        return self.devices


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One device at one moment of a recording."""

    seconds: float
    """Since the recording began."""
    device: str
    memory_used: int | None = None
    memory_total: int | None = None
    kernel_allocated: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None


@dataclass(frozen=True, repr=False)
class HistoryReport(Report[SampleRow]):
    """The GPUs over time, a row a device and moment, oldest first."""

    row_type: ClassVar[type[Any]] = SampleRow

    samples: tuple[SampleRow, ...]
    latest: GPUReport | None = None
    """The last snapshot, whole."""
    interval: float | None = None
    """Seconds from one snapshot to the next."""
    ended: str | None = None
    """Why the recording has ended; None while it goes on."""

    @property
    def rows(self) -> tuple[SampleRow, ...]:
        return self.samples

    def plot(self) -> Any:
        """Return a matplotlib figure of utilisation and memory over time, a line a device.

        Raises:
            GpuMagicError: matplotlib is not installed.
        """
        from gpumagic.render import plot

        return plot.history(self)


@dataclass(frozen=True, slots=True)
class CellUse:
    """What one cell did on one device, by the allocator's own counters."""

    device: str
    allocated_before: int
    allocated_after: int
    peak: int | None
    """Bytes allocated at most during the cell; None where the counter did not rise and so does not tell."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """How fast one device did one thing."""

    device: str
    measure: str
    """``"matmul"`` or ``"copy"``."""
    what: str
    """The dtype of a product; the direction of a copy, with ``", pinned"`` where host memory was page-locked.

    ``"within"`` is a copy from the device to itself, ``"device-to-device"`` one to the next device of its kind.
    """
    rate: float | None = None
    """Floating-point operations a second of a product, bytes a second of a copy; the best go of all."""
    size: int | None = None
    """Rows of the square matrices, or bytes copied."""
    repeats: int | None = None
    reason: str | None = None
    """Why there is no rate."""
    simulated: bool = False
    """True for a simgpu device, whose rates are the CPU's."""


@dataclass(frozen=True, repr=False)
class BenchReport(Report[BenchRow]):
    """What each device does in a second, a row a device and measurement."""

    row_type: ClassVar[type[Any]] = BenchRow

    measurements: tuple[BenchRow, ...]
    torch_version: str | None = None
    threads: int | None = None
    """Threads torch used on the CPU."""
    float32_precision: str | None = None
    """``"highest"`` is true float32; less lets products of float32 be made in TF32 or bfloat16."""

    @property
    def rows(self) -> tuple[BenchRow, ...]:
        return self.measurements

    def rate(self, device: str, what: str) -> float | None:
        """Return one device's rate for a dtype or direction; None if it has none."""
        return next((row.rate for row in self.measurements if (row.device, row.what) == (device, what)), None)


# -- %devices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One storage, with every tensor that looks into it folded under it."""

    device: str
    nbytes: int | None
    """Bytes the storage occupies, rounded as its allocator rounds; 0 for meta and fake tensors; None if unknown."""
    shape: tuple[int, ...]
    """Of the largest live tensor over the storage."""
    dtype: str
    kind: str
    """``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"``, ``"activation"`` or ``"plain"``."""
    name: str | None
    """The best name it has in the notebook, such as ``"model.fc.weight"``; None if nothing there names it."""
    names: tuple[str, ...] = ()
    holder: str | None = None
    """What keeps it alive, when no notebook variable does: ``"Out[12]"``, ``"last traceback"``..."""
    views: int = 0
    """Further live tensors over the same storage."""
    requires_grad: bool = False
    graph_nbytes: int | None = None
    """Bytes its autograd graph keeps for backward; None where it has no graph or it cannot be known."""
    viewed_nbytes: int | None = None
    """Bytes the live tensors really look at; far below ``nbytes`` when a small view keeps a large storage."""
    note: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemoryRow:
    """One device's memory, from the tensors Python can see up to the whole card."""

    device: str
    tensors: int
    storages: int
    named: int
    """Bytes in storages that a notebook name reaches."""
    held: int
    """Bytes in storages that live although nothing in the notebook names them."""
    graph: int | None = None
    """Bytes that only autograd graphs keep, as far as they can be seen."""
    unexplained: int | None = None
    """Allocated bytes that no Python-visible storage accounts for (autograd graphs, C++, other threads)."""
    allocated: int | None = None
    """Bytes the allocator has handed out; None where there is no counting allocator (cpu, meta)."""
    cached: int | None = None
    """Bytes the allocator keeps for reuse."""
    other_processes: int | None = None


@dataclass(frozen=True, repr=False)
class TensorReport(Report[TensorRow]):
    """The live tensors of this process, a row a storage, largest first."""

    row_type: ClassVar[type[Any]] = TensorRow

    tensors: tuple[TensorRow, ...]
    by_device: tuple[DeviceMemoryRow, ...] = ()
    limit: int | None = None
    """How many rows to show; `rows` and `to_pandas` always have all."""
    group_by: str | None = None
    """Show totals by this key instead of rows: ``"device"``, ``"dtype"``, ``"kind"`` or ``"holder"``."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        return self.tensors


# -- names, in more than one report ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """A name of the notebook, and the bytes it keeps on one device."""

    name: str
    device: str
    nbytes: int
    kind: str = "plain"


# -- %%ondevice -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferRow:
    """Moves from one device to another made by one line for one variable and one cause."""

    direction: str
    """``"host-to-device"``, ``"device-to-host"`` or ``"device-to-device"``."""
    source: str
    target: str
    count: int
    nbytes: int
    seconds: float | None
    """Time the calling thread spent in them; None where it was not measured."""
    line: int | None
    """Line of the cell (1 is its first); None outside the cell's own code."""
    code: str | None
    name: str | None
    """The variable moved, where the line names one."""
    cause: str
    """What did it: ``".to"``, ``".cpu"``, ``".item"``, ``"copy_"``, ``"torch.tensor"``..."""


@dataclass(frozen=True, repr=False)
class TransferReport(Report[TransferRow]):
    """What a cell created where, and every move between devices that its lines asked for."""

    row_type: ClassVar[type[Any]] = TransferRow

    device: str
    moves: tuple[TransferRow, ...]
    created: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """``{device: (count, bytes)}`` of tensors made by factory functions."""
    syncs: Mapping[int, int] = field(default_factory=dict)
    """``{line: count}`` of operations that made the host wait for the device."""
    peak: Mapping[str, int] = field(default_factory=dict)
    """``{device: bytes}`` allocated at most during the cell, where the allocator's counter tells it exactly."""
    elapsed: float = 0.0
    elsewhere: tuple[Holder, ...] = ()
    """Variables the cell names that live on another device at its end."""
    advice: tuple[str, ...] = ()
    error: str | None = None
    """The type of the exception that ended the cell, if one did."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[TransferRow, ...]:
        return self.moves


# -- %%oomguard -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that would help, with what it is worth and why we believe it."""

    title: str
    frees: int | None
    """Bytes it would give back; None where that cannot be known beforehand."""
    covers: bool | None
    """Whether that is enough for the request that failed; None if unknown."""
    edit: str | None = None
    """The code to type."""
    evidence: str = ""


@dataclass(frozen=True, repr=False)
class OomReport(Report[Advice]):
    """Why a cell ran out of memory, what came back, who holds the rest, and what would help."""

    row_type: ClassVar[type[Any]] = Advice

    kind: str
    """``"cuda allocator"``, ``"host allocator"``, ``"cublas"``...: which allocator or library gave up."""
    certainty: str
    """``"certain"``, ``"probable"``, or ``"not-oom"`` where torch says out of memory and means a bug in a size."""
    device: str | None
    requested: int | None
    allocated_before: int | None
    allocated_at_failure: int | None
    allocated_after: int | None
    reserved_after: int | None
    line: int | None
    code: str | None
    verdict: str
    """One sentence with the numbers: a shortage, leftovers, another process..."""
    holders: tuple[Holder, ...] = ()
    advice: tuple[Advice, ...] = ()
    capacity: int | None = None
    reserved_before: int | None = None
    reserved_at_failure: int | None = None
    retries: int = 0
    recovered: bool = False
    """True if a retry passed."""
    message: str = ""
    """The first line of the original exception."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Advice, ...]:
        return self.advice
