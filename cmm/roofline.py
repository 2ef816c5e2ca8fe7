"""How fast can it be? FLOPs, bytes and time bounds of a collective matmul, from the numbers of a machine.

Machines are described by their data sheets here; `cmm.calibrate.this_machine` measures the one at hand. Times are in
microseconds and names say so. All sizes are those of one device: `m_shard` rows of activations, `n_shard`
columns of weights.
"""

import dataclasses
from typing import Literal

ITEMSIZE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Problem:
    """`AllGather(A) @ B` on a ring: `A[M_X, K]` in shards `[m_shard, k]`, `B[K, N_X]` in shards `[k, n_shard]`.

    Attributes:
      axis_size: number of devices along the mesh axis.
      m_shard: rows of the activations on one device.
      k: contraction size.
      n_shard: columns of the weights on one device.
      dtype: "float16", "bfloat16" or "float32".
    """

    axis_size: int
    m_shard: int
    k: int
    n_shard: int
    dtype: str = "float16"

    def __post_init__(self):
        for name in ("axis_size", "m_shard", "k", "n_shard"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.dtype not in ITEMSIZE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE_BYTES)}, got {self.dtype!r}.")

    @property
    def flops_per_device(self) -> int:
        """Multiplications and additions of one device for the whole collective matmul."""
        return 2 * self.axis_size * self.m_shard * self.k * self.n_shard

    @property
    def bytes_per_hop(self) -> int:
        """Bytes of one shard of the activations: what one device sends in one step of the ring."""
        return self.m_shard * self.k * ITEMSIZE_BYTES[self.dtype]

    @property
    def bytes_received_per_device(self) -> int:
        """Bytes that reach one device in all; the same for the all-gather and for either ring."""
        return (self.axis_size - 1) * self.bytes_per_hop


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one device of a machine can do.

    Attributes:
      name: what figures and tables print.
      peak_flops_per_s: dense peak by dtype. A dtype that is missing has no known peak.
      link_bytes_per_s: bytes per second that one device can send to its peers, one direction.
      source: where the numbers come from.
    """

    name: str
    peak_flops_per_s: dict[str, float]
    link_bytes_per_s: float
    source: str


# Full float32 does not run on the tensor cores: its peak is that of the CUDA cores.
_HOPPER_PEAKS = {"float16": 989.5e12, "bfloat16": 989.5e12, "float32": 66.9e12}
_HOPPER_SOURCE = (
    "NVIDIA data sheets, SXM parts: dense rates of the H100 and H200; NVLink 4, 900 GB/s counting both directions"
)

H100_SXM = Machine("H100 SXM", _HOPPER_PEAKS, 450e9, _HOPPER_SOURCE)
H200_SXM = Machine("H200 SXM", _HOPPER_PEAKS, 450e9, _HOPPER_SOURCE)

# The names under which JAX lists these GPUs. Other Hopper parts (PCIe, NVL) have other clocks and links.
MACHINES_BY_DEVICE_KIND = {"NVIDIA H100 80GB HBM3": H100_SXM, "NVIDIA H200": H200_SXM}


def peak_flops_per_s(machine: Machine, dtype: str) -> float:
    """Returns the peak of `machine` for `dtype` in FLOP/s, or raises a `ValueError` that lists the known dtypes."""
    if dtype not in machine.peak_flops_per_s:
        known = ", ".join(machine.peak_flops_per_s)
        raise ValueError(f"No peak is known for {dtype} on {machine.name}. Known dtypes: {known}.")
    return machine.peak_flops_per_s[dtype]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Time bounds of one collective matmul, in microseconds.

    Attributes:
      t_math_us: all FLOPs at peak rate.
      t_comms_us: all received bytes at link rate.
      t_lower_us: the larger of the two: perfect overlap.
      t_upper_us: the sum of the two: no overlap.
    """

    t_math_us: float
    t_comms_us: float
    t_lower_us: float
    t_upper_us: float


def bounds(problem: Problem, machine: Machine) -> Bounds:
    """Returns the time bounds of `problem` on `machine`.

    Raises:
      ValueError: the machine has no known peak for the dtype.

    Source: the roofline model as in "How to Scale Your Model" (Austin et al., 2025), chapter on rooflines.
    """
    t_math_us = problem.flops_per_device / peak_flops_per_s(machine, problem.dtype) * 1e6
    t_comms_us = problem.bytes_received_per_device / machine.link_bytes_per_s * 1e6
    return Bounds(t_math_us, t_comms_us, max(t_math_us, t_comms_us), t_math_us + t_comms_us)


def overlapped_estimate_us(axis_size: int, t_local_us: float, t_round_us: float) -> float:
    """Estimates the overlapped kernel: `axis_size` local matmuls, and a cost for each change of step between them.

    Args:
      axis_size: number of devices on the ring.
      t_local_us: measured time of one local matmul `[m_shard, k] @ [k, n_shard]`, in microseconds.
      t_round_us: time from the end of one step to the start of the next (the last transfer, signal and wait).

    Returns:
      `axis_size * t_local_us + (axis_size - 1) * t_round_us`.

    Source: "Collective matrix multiplication" in the JAX documentation (Pallas:Mosaic GPU).
    """
    return axis_size * t_local_us + (axis_size - 1) * t_round_us


def utilization(problem: Problem, time_us: float, machine: Machine) -> float:
    """Returns the share of the peak that `time_us` amounts to, between 0 and 1."""
    return problem.flops_per_device / (time_us * 1e-6) / peak_flops_per_s(machine, problem.dtype)


def tflops_per_device(problem: Problem, time_us: float) -> float:
    """Returns the rate of one device in TFLOP/s."""
    return problem.flops_per_device / time_us * 1e-6


def hop_hides(problem: Problem, machine: Machine) -> bool:
    """Says whether one hop takes no longer than the product that it should hide behind, both at full rate."""
    hop_s = problem.bytes_per_hop / machine.link_bytes_per_s
    product_s = problem.flops_per_device / problem.axis_size / peak_flops_per_s(machine, problem.dtype)
    return hop_s <= product_s


@dataclasses.dataclass(frozen=True)
class GatherChoice:
    """Which operand is cheaper to gather.

    Attributes:
      gather: "activations" (`C` comes out as `[M, N_X]`) or "weights" (`C` comes out as `[M_X, N]`).
      bytes_activations: bytes that each device receives when the activations are gathered.
      bytes_weights: bytes that each device receives when the weights are gathered.
    """

    gather: Literal["activations", "weights"]
    bytes_activations: int
    bytes_weights: int


def cheaper_gather(problem: Problem) -> GatherChoice:
    """Compares gathering the activations with gathering the weights.

    Either way each device does the same FLOPs, `2 * axis_size * m_shard * k * n_shard`; only the bytes and the
    sharding of the result differ. The answer is a matter of rows against columns: gather the activations as long as a
    device has no more rows of them than columns of weights. Large batches in training gather the weights (fully
    sharded data parallelism), small ones the activations (tensor parallelism).
    """
    weights = dataclasses.replace(problem, m_shard=problem.n_shard).bytes_received_per_device
    activations = problem.bytes_received_per_device
    return GatherChoice("activations" if activations <= weights else "weights", activations, weights)


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One row of the published table, times in microseconds. `reference` is NCCL all-gather and cuBLAS matmul."""

    axis_size: int
    bound_us: float
    kernel_us: float
    reference_us: float


PUBLISHED_SOURCE = 'JAX documentation, "Collective matrix multiplication" (Pallas:Mosaic GPU), H100 SXM'
PUBLISHED_T_LOCAL_US = 43.0
PUBLISHED_T_ROUND_US = 6.0
PUBLISHED_ROWS = (
    PublishedRow(2, 92.0, 102.0, 147.0),
    PublishedRow(4, 190.0, 212.0, 290.0),
    PublishedRow(8, 386.0, 436.0, 565.0),
)


def published_problem(axis_size: int) -> Problem:
    """Returns the problem of the published table: float16, 1024 rows, k = 4096 and 4096 columns per shard."""
    return Problem(axis_size, m_shard=1024, k=4096, n_shard=4096, dtype="float16")
