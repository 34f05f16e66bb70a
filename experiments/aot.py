"""Compiling for an NVIDIA GPU on a machine that has none, and reading what came out.

XLA's CUDA compiler needs no GPU when it is told what GPU to compile for. `compile_for` does that for
an A100, an H200 or a B200 and returns the optimised program's memory analysis and the PTX of each
kernel; `assemble` turns PTX into a cubin and reports registers and spills; `main_loop` finds the
kernel's hot loop in the disassembly and counts its instructions.

Needs the wheels jax-cuda12-plugin and jax-cuda12-pjrt of JAX's own version (their compiler) and
triton (its ptxas and nvdisasm), all without their dependencies; `find_tools` says how to get them.
Must be imported before jax: it sets JAX_PLATFORMS and XLA_FLAGS for this process.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU as the compiler needs to know it; `clock_ghz` is the boost clock."""

    name: str
    capability: tuple[int, int]
    sms: int
    clock_ghz: float
    bandwidth: float  # bytes/s
    l2_bytes: int
    memory_bytes: int
    shared_per_sm: int
    shared_per_block: int
    fp32_per_sm: int


GPUS = {
    "sm_80": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 2.039e12, 40 << 20, 80 << 30, 167936, 166912, 64
    ),
    "sm_90": Gpu(
        "NVIDIA H200", (9, 0), 132, 1.98, 4.8e12, 60 << 20, 141 << 30, 233472, 232448, 128
    ),
    "sm_100": Gpu(
        "NVIDIA B200", (10, 0), 148, 1.965, 8.0e12, 126 << 20, 180 << 30, 233472, 232448, 128
    ),
}


def target_config(gpu: Gpu) -> str:
    """The text proto (stream_executor GpuTargetConfigProto) that describes `gpu` to XLA."""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: {gpu.shared_per_sm}
  shared_memory_per_block_optin: {gpu.shared_per_block}
  core_count: {gpu.sms}  fpus_per_core: {gpu.fp32_per_sm}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.bandwidth)}  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{gpu.name}"
"""


class MissingTools(Exception):
    """The compiler's wheels or the disassembler are not installed; the message says how to get them."""


class Tools(NamedTuple):
    """Programs of the CUDA toolkit."""

    ptxas: Path
    ptxas_blackwell: Path
    nvdisasm: Path
    libdevice: Path


def find_tools(plugin_path: Path | None = None) -> Tools:
    """Finds the compiler plugin and the CUDA programs, on sys.path or in `plugin_path`.

    Raises:
      MissingTools: with the command that installs what is missing.
    """
    if plugin_path is not None and str(plugin_path) not in sys.path:
        sys.path.insert(0, str(plugin_path))
    version = importlib.metadata.version("jax")
    install = (
        f"pip install --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} triton"
        " (with --target DIR: pass --plugin-path DIR)"
    )
    found = {path.name: path for entry in sys.path for path in _candidates(entry)}
    if "jax_cuda12_plugin" not in found or not _has_pjrt():
        raise MissingTools(f"JAX's CUDA 12 compiler plugin is not installed: {install}")
    have = _distribution_version(found["jax_cuda12_plugin"].parent)
    if have is not None and have != version:
        raise MissingTools(f"jax-cuda12-plugin is {have} and jax is {version}: {install}")
    if "triton" not in found:
        raise MissingTools(
            f"triton, whose ptxas and nvdisasm read the result, is missing: {install}"
        )
    nvidia = found["triton"] / "backends" / "nvidia"
    tools = Tools(
        nvidia / "bin" / "ptxas",
        nvidia / "bin" / "ptxas-blackwell",
        nvidia / "bin" / "nvdisasm",
        nvidia / "lib" / "libdevice.10.bc",
    )
    for tool in tools:
        if not tool.exists():
            raise MissingTools(f"the triton wheel has no {tool.name}: {install}")
    return tools


def _candidates(entry: str) -> list[Path]:
    return [
        path
        for name in ("jax_cuda12_plugin", "triton")
        if (path := Path(entry or ".") / name).is_dir()
    ]


def _has_pjrt() -> bool:
    return any((Path(entry or ".") / "jax_plugins" / "xla_cuda12").is_dir() for entry in sys.path)


def _distribution_version(folder: Path) -> str | None:
    for found in importlib.metadata.distributions(path=[str(folder)]):
        if found.metadata["Name"].replace("_", "-") == "jax-cuda12-plugin":
            return found.version
    return None


class Compiled(NamedTuple):
    """One program compiled for one GPU."""

    ptx: dict[str, str]  # kernel name -> the PTX module that holds it
    hlo: str  # optimised HLO
    temp_bytes: int  # of the whole call
    alias_bytes: int
    shared_bytes: dict[str, int]  # kernel name -> dynamic shared memory


_DUMP: Path | None = None


def prepare_process(tools: Tools) -> None:
    """Sets the environment that JAX reads when it is imported; call before the first import."""
    global _DUMP
    assert "jax" not in sys.modules, "the compiler flags must be set before jax is imported"
    _DUMP = Path(tempfile.mkdtemp(prefix="aot-"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    cuda = _DUMP / "cuda" / "nvvm" / "libdevice"
    cuda.mkdir(parents=True)
    (cuda / "libdevice.10.bc").symlink_to(tools.libdevice)
    flags = [f"--xla_dump_to={_DUMP}", f"--xla_gpu_cuda_data_dir={_DUMP / 'cuda'}"]
    if _version("jax") >= (0, 11):
        flags.append("--xla_dump_emitter_re=ptx")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version(package))[:2])


def compile_for(arch: str, fn: Callable[..., Any], args: Sequence[Any]) -> Compiled:
    """Compiles jit(fn) for `arch` ("sm_80", "sm_90", "sm_100") from ShapeDtypeStructs."""
    import jax
    from jax.experimental import topologies

    assert _DUMP is not None, "call prepare_process first"
    for old in _DUMP.glob("*.*"):
        if old.is_file():
            old.unlink()
    topology = topologies.get_topology_desc(
        "gpu", "cuda", target_config=target_config(GPUS[arch]), topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(topology.devices, ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), tuple(args)
    )
    context: Any = contextlib.nullcontext()
    if _version("jax") >= (0, 11):
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with context:
        lowered = jax.jit(fn, out_shardings=everywhere).lower(*args)
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    modules = [path.read_text() for path in _DUMP.glob("*.ptx")]
    ptx = {name: text for text in modules for name in re.findall(r"\.entry (\w+)\(", text)}
    thunks = "\n".join(p.read_text(errors="replace") for p in _DUMP.glob("*thunk*.txt"))
    return Compiled(
        ptx,
        compiled.as_text(),
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        _shared_memory(thunks, list(ptx)),
    )


def _shared_memory(thunks: str, kernels: list[str]) -> dict[str, int]:
    found = {}
    for name in kernels:
        match = re.search(
            rf"\b{name}\b[^\n]*?\n?(?:[^\n]*\n){{0,40}}?[^\n]*shared_memory: (\d+)", thunks
        )
        found[name] = int(match[1]) if match else 0
    return found


class Assembled(NamedTuple):
    """What ptxas says of one kernel."""

    target: str
    registers: int
    spill_bytes: int
    static_shared_bytes: int
    sass: str


def assemble(tools: Tools, ptx: str, arch: str) -> Assembled:
    """Runs ptxas and nvdisasm on a PTX module."""
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    programs = [tools.ptxas, tools.ptxas_blackwell]  # the latter is newer and knows later PTX too
    if GPUS[arch].capability[0] >= 10:
        programs = [tools.ptxas_blackwell]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        for program in programs:
            done = subprocess.run(
                [program, "-v", f"-arch={target}", source, "-o", cubin],
                capture_output=True,
                text=True,
            )
            said = done.stderr
            if "Unsupported .version" not in said:
                break
        if done.returncode:
            raise ValueError(f"{program.name} for {target}: {said.strip()[:300]}")
        sass = subprocess.run(
            [tools.nvdisasm, "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    shared = re.search(r"(\d+) bytes smem", said)
    return Assembled(
        target,
        int(re.search(r"Used (\d+) registers", said)[1]),
        int(spills[1]) + int(spills[2]) if spills else 0,
        int(shared[1]) if shared else 0,
        sass,
    )


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)")
_LABEL = re.compile(r"^(\.L_\w+):")
TENSOR_CORE = ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
_WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}


class Loop(NamedTuple):
    """One loop of a kernel, counted as one warp executes it once."""

    instructions: int
    opcodes: collections.Counter  # base opcode -> count
    loads: collections.Counter  # (asynchronous?, bytes a thread) -> count


class _Block(NamedTuple):
    """Instructions without a branch but at the end."""

    opcodes: list[str]
    successors: list[int]


def _blocks(sass: str) -> list[_Block]:
    """The control-flow graph of the one function in a disassembly."""
    labels: dict[str, int] = {}
    parsed: list[tuple[list[str], str | None, bool]] = []  # opcodes, branch target, falls through
    current: list[str] = []

    def close(target: str | None, falls: bool) -> None:
        nonlocal current
        parsed.append((current, target, falls))
        current = []

    for line in sass.splitlines():
        if label := _LABEL.match(line.strip()):
            if current:
                close(None, True)
            labels[label[1]] = len(parsed)
        elif instruction := _INSTRUCTION.match(line):
            name = instruction[1]
            current.append(name)
            base = name.split(".")[0]
            if base in ("BRA", "EXIT", "RET"):
                conditional = "@" in line.split(name)[0] or re.search(r"BRA\S*\s+!?U?P\d", line)
                target = re.search(r"`\((\.L_\w+)\)", line)
                close(target[1] if target else None, bool(conditional))
    close(None, False)
    return [
        _Block(
            opcodes,
            ([labels[target]] if target in labels and labels[target] < len(parsed) else [])
            + ([index + 1] if falls and index + 1 < len(parsed) else []),
        )
        for index, (opcodes, target, falls) in enumerate(parsed)
    ]


def loops(sass: str) -> list[Loop]:
    """Every natural loop: what reaches a backward edge without leaving through the loop's head.

    A branch to a lower address is not enough: compilers place code out of line and jump back.
    """
    blocks = _blocks(sass)
    dominators = _dominators(blocks)
    before: dict[int, set[int]] = {index: set() for index in range(len(blocks))}
    for index, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].add(index)
    bodies: dict[int, set[int]] = {}
    for index in dominators:
        for head in blocks[index].successors:
            if head in dominators[index]:
                body, todo = {head}, [index]
                while todo:
                    block = todo.pop()
                    if block not in body:
                        body.add(block)
                        todo.extend(p for p in before[block] if p in dominators)
                bodies.setdefault(head, set()).update(body)
    return [
        _count([op for b in sorted(body) for op in blocks[b].opcodes]) for body in bodies.values()
    ]


def _dominators(blocks: list[_Block]) -> dict[int, set[int]]:
    """Of each reachable block, the blocks that every path from the entry passes."""
    reachable, todo = {0}, [0]
    while todo:
        for successor in blocks[todo.pop()].successors:
            if successor not in reachable:
                reachable.add(successor)
                todo.append(successor)
    dominators = {index: set(reachable) for index in reachable}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for index in sorted(reachable - {0}):
            above = [dominators[p] for p in reachable if index in blocks[p].successors]
            new = {index} | set.intersection(*above)
            if new != dominators[index]:
                dominators[index], changed = new, True
    return dominators


def _count(opcodes: list[str]) -> Loop:
    base = collections.Counter(name.split(".")[0] for name in opcodes)
    loads: collections.Counter = collections.Counter()
    for name in opcodes:
        kind = name.split(".")[0]
        if kind in ("LDG", "LDGSTS"):
            width = next((w for suffix, w in _WIDTHS.items() if suffix in name), 4)
            loads[kind == "LDGSTS", width] += 1
    return Loop(len(opcodes), base, loads)


def tensor_ops(loop: Loop) -> int:
    """Tensor-core instructions of a loop."""
    return sum(loop.opcodes[name] for name in TENSOR_CORE)


def main_loop(sass: str) -> Loop | None:
    """The loop with most tensor-core instructions; the shortest of equals.

    A kernel with a masked and an unmasked loop has two with the same matrix products. The unmasked
    one is the shorter, and runs for all tiles but the first and the last.
    """
    all_loops = loops(sass)
    if not all_loops:
        return None
    most = max(tensor_ops(loop) for loop in all_loops)
    return min((x for x in all_loops if tensor_ops(x) == most), key=lambda x: x.instructions)
