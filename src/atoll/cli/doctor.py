"""`atoll doctor`: what this machine has, what is missing, and the command that gets it."""

from __future__ import annotations

import importlib
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import typer

from atoll.cli.shared_options import AsJson
from atoll.core.machine import DetectedGpu, count_cpus, cpu_name, find_gpus, memory_bytes
from atoll.core.units import format_bytes
from atoll.core.version import __version__
from atoll.report.terminal import emit, note, table

if TYPE_CHECKING:
    from rich.console import Group

MIN_PYTHON = (3, 11)

# Import name of every base dependency by distribution name.
REQUIRED: dict[str, str] = {
    "jinja2": "jinja2",
    "numpy": "numpy",
    "plotille": "plotille",
    "pydantic": "pydantic",
    "pydantic-settings": "pydantic_settings",
    "pyyaml": "yaml",
    "rich": "rich",
    "typer": "typer",
}


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional part of Atoll: the packages it needs and what it enables."""

    name: str
    packages: tuple[str, ...]
    enables: str


EXTRAS: tuple[Extra, ...] = (
    Extra(
        "engine",
        (
            "torch",
            "transformers",
            "tokenizers",
            "safetensors",
            "gguf",
            "huggingface_hub",
            "llguidance",
            "pyzmq",
        ),
        "running models with Atoll's own engine",
    ),
    Extra(
        "components",
        ("hibari-tts", "msgspec", "numpy", "onnxruntime", "pillow"),
        "serving any-to-any models: speech, pictures, embeddings",
    ),
    Extra("sound", ("soundfile",), "FLAC, MP3 and Ogg from clients"),
    Extra("media", ("av",), "MP4, WebM, M4A from clients; MP3, Opus for them"),
    Extra("diffusion", ("diffusers",), "Qwen-Image as parts of a fleet"),
    Extra("aic", ("aiconfigurator-core",), "comparing predictions with AIConfigurator's tables"),
    Extra("calibrate", ("scipy",), "fitting the performance model to measurements"),
    Extra("plan", ("numba", "highspy", "scipy"), "finding plans and simulating them"),
    Extra("cp", ("ortools",), "placing models by constraint programming (--solver cp)"),
    Extra(
        "serve",
        (
            "httptools",
            "msgspec",
            "prometheus_client",
            "python-multipart",
            "uvloop",
            "websockets",
        ),
        "the gateway and instances",
    ),
    Extra("nixl", ("nixl",), "arrays between executors by RDMA"),
    Extra(
        "fabric",
        ("eclipse-zenoh", "cryptography", "msgspec", "nvidia-ml-py"),
        "joining nodes of several sites into one service",
    ),
    Extra(
        "accounts",
        ("sqlalchemy", "alembic", "aiosqlite", "msgspec"),
        "API keys, limits and the usage ledger",
    ),
    Extra("postgres", ("psycopg",), "keeping accounts in PostgreSQL"),
    Extra("parquet", ("pyarrow",), "exporting usage as Parquet"),
    Extra("kubernetes", ("kubernetes",), "instances as pods of a Kubernetes cluster"),
    Extra("ray", ("ray",), "the machines of a Ray cluster that instances run on"),
    Extra("skypilot", ("skypilot",), "instances on machines that SkyPilot rents"),
    Extra(
        "otel",
        ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
        "sending traces to OpenTelemetry",
    ),
    Extra("llamacpp", ("xllamacpp",), "running GGUF models with llama.cpp"),
    Extra("plots", ("matplotlib",), "figures as image files"),
    Extra(
        "reference",
        ("scipy", "ortools", "gurobipy", "networkx"),
        "checking plans against other solvers",
    ),
)


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package; `version` is None when it is missing, `problem` says what is wrong."""

    name: str
    version: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ExtraState:
    """Whether an extra is complete, and how to complete it."""

    name: str
    enables: str
    packages: tuple[Package, ...]
    installed: bool
    install: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the doctor found; `problems` lists what keeps Atoll from working."""

    atoll: str
    python: str
    os: str
    cpu: str
    cpu_count: int
    memory_bytes: float | None
    required: tuple[Package, ...]
    extras: tuple[ExtraState, ...]
    gpus: tuple[DetectedGpu, ...]
    gpu_note: str | None
    problems: tuple[str, ...]


app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    as_json: AsJson = False,
) -> None:
    """Check what is installed, what is missing and how to get it."""
    report = examine()
    emit(report, as_json, lambda: _draw(report))
    if report.problems:
        for problem in report.problems:
            note(f"error: {problem}")
        raise typer.Exit(1)


def examine() -> Report:
    """Look at this machine and this installation; reads and runs `nvidia-smi`, changes nothing."""
    required = tuple(required_package(name, module) for name, module in REQUIRED.items())
    gpus, gpu_note = find_gpus()
    problems = [f"{p.name}: {p.problem} (fix: pip install atoll)" for p in required if p.problem]
    if sys.version_info < MIN_PYTHON:
        version = platform.python_version()
        problems.insert(0, f"Python {version} is too old (fix: use 3.11 or newer)")
    return Report(
        atoll=__version__,
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cpu_count=count_cpus(),
        memory_bytes=memory_bytes(),
        required=required,
        extras=tuple(extra_state(extra) for extra in EXTRAS),
        gpus=gpus,
        gpu_note=gpu_note,
        problems=tuple(problems),
    )


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution without importing it, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def required_package(name: str, module: str) -> Package:
    """Import a base dependency to see whether it works."""
    version = installed_version(name)
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  a broken package may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Package(name, version, "is not installed" if version is None else reason)
    return Package(name, version)


def extra_state(extra: Extra) -> ExtraState:
    """Say which packages of an extra are installed; large ones are not imported to find out."""
    packages = tuple(Package(name, installed_version(name)) for name in extra.packages)
    return ExtraState(
        name=extra.name,
        enables=extra.enables,
        packages=packages,
        installed=all(package.version is not None for package in packages),
        install=f"pip install 'atoll[{extra.name}]'",
    )


def _draw(report: Report) -> Group:
    from rich.console import Group
    from rich.text import Text

    machine = table(
        ("machine", ""),
        [
            ("atoll", report.atoll),
            ("python", report.python),
            ("system", report.os),
            ("cpu", f"{report.cpu}, {report.cpu_count} usable"),
            ("memory", _size(report.memory_bytes)),
            *(("gpu", f"{g.name}, {_size(g.memory_bytes)}, {g.driver}") for g in report.gpus),
            *([("gpu", report.gpu_note)] if report.gpu_note else []),
        ],
    )
    required = table(
        ("required", "version", "state"),
        [(p.name, p.version, p.problem or "ok") for p in report.required],
    )
    extras = table(
        ("extra", "state", "enables", "packages"),
        [
            (
                extra.name,
                "ok" if extra.installed else "missing",
                extra.enables,
                _contents(extra),
            )
            for extra in report.extras
        ],
    )
    # Under the table, not in it: a command folded over two lines cannot be copied.
    missing = [extra for extra in report.extras if not extra.installed]
    commands = [f"  {extra.install}   # {extra.enables}" for extra in missing]
    advice = Text("\n".join(["  To get what is missing:", *commands, ""]) if missing else "")
    return Group(machine, required, extras, advice)


def _size(size_bytes: float | None) -> str:
    return "unknown size" if size_bytes is None else format_bytes(size_bytes)


def _contents(extra: ExtraState) -> str:
    present = [f"{package.name} {package.version}" for package in extra.packages if package.version]
    missing = [package.name for package in extra.packages if not package.version]
    return "; ".join(
        part for part in (", ".join(present), "no " + ", ".join(missing) if missing else "") if part
    )
