"""The proxies that the gateway is compared with: started alike, or a reason why not."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from atoll.core.paths import cache_dir
from atoll.runtime.http.listen_address import free_ports
from benchmarks.process_cpu import list_children, read_schedule_s, stop
from benchmarks.report import ROOT
from benchmarks.serving.fake_engine import MODEL

CACHE = cache_dir() / "benchmarks"
KEY = f"sk-{secrets.token_hex(32)}"
"""Sent with every request; LiteLLM does not start without one."""
_PIP_S = 900.0
_START_S = 120.0


class UnavailableError(Exception):
    """A peer cannot be run here; says why in a line."""


@dataclass
class Proxy:
    """Something that listens and forwards, and the process to charge for it."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """CPU seconds of the process with its threads and children."""
        family = [self.process.pid]
        for pid in family:
            family += list_children(pid)
        return read_schedule_s(family)[0]

    def stop(self) -> None:
        """End it."""
        stop(self.process)


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def _wait(name: str, port: int, process: subprocess.Popen[bytes], path: str, log: Path) -> Proxy:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UnavailableError(f"{name} ended with code {process.returncode}: {_last(log)}")
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", headers={"authorization": f"Bearer {KEY}"}
            )
            with urllib.request.urlopen(request, timeout=5):
                return Proxy(name, port, process)
        except OSError:
            time.sleep(0.1)
    stop(process)
    raise UnavailableError(f"{name} did not listen within {_START_S:g} s")


def _start(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    # Everyone writes an access log, to a file.
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | environment
        )


def engine(folder: Path) -> Proxy:
    """Start the fake engine."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "benchmarks.fake_engine", "--port", str(port)]
    return _wait("direct", port, _start(command, folder), "/v1/models", folder / "log")


def gateway(folder: Path, engine_port: int) -> Proxy:
    """Start Atoll's gateway."""
    port = free_ports(1)[0]
    config = folder / "gateway.yaml"
    config.write_text(
        f"port: {port}\nbackends:\n"
        f"  - {{id: e, url: 'http://127.0.0.1:{engine_port}', models: [{MODEL}], kind: vllm}}\n"
    )
    command = [sys.executable, "-m", "atoll.runtime.gateway", "--config", str(config)]
    return _wait("gateway", port, _start(command, folder), "/health", folder / "log")


_NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000;
  upstream engine {{ server 127.0.0.1:{engine_port}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def nginx(folder: Path, engine_port: int) -> Proxy:
    """Start nginx as people set it up for streams: kept connections, no buffering, one worker."""
    binary = _nginx_binary()
    port = free_ports(1)[0]
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, port=port, engine_port=engine_port))
    command = [binary, "-p", str(folder), "-c", str(config)]
    return _wait("nginx", port, _start(command, folder), "/v1/models", folder / "log")


def _nginx_binary() -> str:
    found = shutil.which("nginx")
    if found:
        return found
    folder = CACHE / "nginx"
    binary = folder / "usr/sbin/nginx"
    if not binary.exists():
        # Debian's package holds one program that runs from anywhere.
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            raise UnavailableError("nginx is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        _call("nginx", ["apt-get", "download", "nginx"], folder, 120)
        for package in folder.glob("nginx_*.deb"):
            _call("nginx", ["dpkg", "-x", package.name, "."], folder, 60)
    _call("nginx", [str(binary), "-v"], folder, 10)
    return str(binary)


def litellm_environment() -> Path:
    """Return an environment with LiteLLM alone, installed once; UnavailableError: it cannot be."""
    venv = CACHE / "litellm"
    if not (venv / "ready").exists():
        print("  installing litellm[proxy] into its own environment (minutes, once)", flush=True)
        venv.mkdir(parents=True, exist_ok=True)
        _call("litellm", [sys.executable, "-m", "venv", str(venv)], venv, 120)
        pip = [
            str(venv / "bin/pip"),
            "install",
            "-q",
            "--disable-pip-version-check",
            "litellm[proxy]",
        ]
        _call("litellm", pip, venv, _PIP_S)
        (venv / "ready").touch()
    return venv


def litellm(folder: Path, engine_port: int) -> Proxy:
    """Start LiteLLM's proxy from an environment of its own."""
    program = litellm_environment() / "bin/litellm"
    port = free_ports(1)[0]
    config = folder / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n"
        f"      model: openai/{MODEL}\n      api_base: http://127.0.0.1:{engine_port}/v1\n"
        "      api_key: x\n"
    )
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--num_workers", "1"]
    process = _start(
        command,
        folder,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_LOG="ERROR",
        LITELLM_MASTER_KEY=KEY,
        NO_DOCS="True",
    )
    return _wait("litellm", port, process, "/v1/models", folder / "log")


def _call(name: str, command: list[str], folder: Path, seconds: float) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{name}: {command[0]} failed: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnavailableError(f"{name}: {' '.join(command[:3])} failed: {last[:200]}")
