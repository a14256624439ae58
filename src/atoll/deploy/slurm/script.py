"""The batch script of an instance: what is asked of Slurm, and what every machine of it runs.

A job on one machine runs its commands as children of the batch shell, so that Slurm's signals to that shell
(SIGTERM to drain, SIGUSR1 before the wall time ends) go to them and to nobody else. Over several machines,
each runs the same few lines as a step of its own. A signal to a step would reach every process in it, engines
and their workers too, so the batch shell writes it into a file that all machines read every second.

Nothing here trusts a value: those in #SBATCH lines are checked by `SlurmSettings` or quoted the way sbatch
reads them, and everything else is quoted for bash.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.core.ids import parse_node_type
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.slurm.slurm_jobs import JobComment, write_comment
from atoll.deploy.slurm.slurm_pool import GpuChoice
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import DeployError, StartOrder
from atoll.plan.plan import Market

PORT = "{port}"
LOG_SUFFIX = ".log"
STATE_SUFFIX = ".state"
SIGNAL_FILE = "signal"
JOB_LOG = "job.log"
SECRETS = "secrets"
_CPU_OPTIONS = ("--cpus-per", "--exclusive")
_EXCLUDE = "--exclude="
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")

_CHOOSE_PORT = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
_AWAIT_READY = """\
import http.client, json, os, sys, time
pid, port, state, log = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
def answers():
    way = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        way.request("GET", "/health")
        status = way.getresponse().status
    except (OSError, http.client.HTTPException):
        return False
    finally:
        way.close()
    return status < 400 or status == 404
def announced():
    # What joins a fabric says in its log what gateways hear of.
    said = True
    with open(log, errors="replace") as lines:
        for line in lines:
            if line.startswith('{"time":') and '"event":"node.' in line and line.endswith("\\n"):
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if event.get("event") == "node.joined":
                    said = False
                elif event.get("event") == "node.announced":
                    said = bool(event.get("models"))
    return said
while True:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        sys.exit()
    if answers() and announced():
        break
    time.sleep(0.5)
with open(state, "a") as file:
    file.write("ready\\n")
"""
"""Ready is a command that answers where it listens, and that gateways know of if it joins a fabric."""


@dataclass(frozen=True, slots=True)
class JobMachine:
    """One machine of an instance, with the commands that share it; `host` where the plan names it."""

    gpu: str | None
    gpus: int
    market: Market
    host: str | None
    commands: tuple[NodeCommand, ...]


@dataclass(frozen=True, slots=True)
class JobComponent:
    """Machines that are asked for alike: the whole of a job, or a component of a heterogeneous one."""

    machines: tuple[JobMachine, ...]

    @property
    def first(self) -> JobMachine:
        """A machine that stands for all."""
        return self.machines[0]


def group_machines(order: StartOrder) -> tuple[JobComponent, ...]:
    """Return an instance's machines by what is asked for, in the order of its commands.

    Slices of one machine (same slot or host) are one request; every other command has a machine of its own.
    """
    order.refuse_shares("Slurm")
    nodes = {node.id: node for node in order.instance.nodes}
    shared: dict[tuple[object, ...], list[NodeCommand]] = {}
    for index, command in enumerate(order.commands):
        node = nodes.get(command.node)
        key: tuple[object, ...] = (index,)
        if node is not None and node.gpu_ids is not None and (node.host, node.slot) != (None, None):
            key = (node.node_type, node.market, node.region, node.host, node.slot)
        shared.setdefault(key, []).append(command)
    components: dict[tuple[object, ...], list[JobMachine]] = {}
    for commands in shared.values():
        node = nodes.get(commands[0].node)
        gpus = sum(command.gpus for command in commands)
        machine = JobMachine(
            gpu=parse_node_type(commands[0].node_type).gpu if gpus else None,
            gpus=gpus,
            market=node.market if node is not None else "on-demand",
            host=node.host if node is not None else None,
            commands=tuple(commands),
        )
        alike = (machine.gpu, machine.gpus, machine.market, machine.host)
        components.setdefault(alike, []).append(machine)
    return tuple(JobComponent(tuple(machines)) for machines in components.values())


def write_script(
    order: StartOrder,
    components: Sequence[JobComponent],
    choices: Sequence[GpuChoice],
    settings: SlurmSettings,
    home: str,
    exclude: Sequence[str] = (),
) -> str:
    """Return the batch script of an order; `choices` say how each component's GPUs are asked for.

    `exclude` are nodes of the cluster that it must not stand on.
    """
    _check(order)
    comment = write_comment(JobComment(ready_s=order.ready_s, labels=order.labels))
    asked: list[str] = []
    for index, (component, choice) in enumerate(zip(components, choices, strict=True)):
        asked += ["#SBATCH hetjob"] if index else []
        asked += _ask(component, choice, settings, comment, order.labels.instance, exclude)
        asked += [f"#SBATCH --output={quote_directive(f'{home}/{JOB_LOG}')}"] if not index else []
    machines = [
        (group, relative, choices[group], machine)
        for group, component in enumerate(components)
        for relative, machine in enumerate(component.machines)
    ]
    body = [
        f"home={shlex.quote(home)}",
        # Secrets go when the job's shell ends.
        f"trap 'rm -rf -- \"$home/{SECRETS}\"' EXIT",
        *(f"module load {shlex.quote(name)}" for name in settings.modules),
    ]
    if len(machines) == 1:
        body.append(write_machine(machines[0][3].commands, settings, home))
    else:
        steps = [
            _step(group if len(components) > 1 else None, relative, choice, machine, settings, home)
            for group, relative, choice, machine in machines
        ]
        body.append(_BEGIN.replace("@FORWARD@", f'echo "$1" >> "$home/{SIGNAL_FILE}"'))
        body += ["heed() { :; }", "tell() { :; }", *steps, _END]
    return "\n".join(["#!/bin/bash", *asked, "", *body, ""])


def _ask(
    component: JobComponent,
    choice: GpuChoice,
    settings: SlurmSettings,
    comment: str,
    instance: str,
    exclude: Sequence[str],
) -> list[str]:
    # Given twice, the last one alone would count.
    own = [option for option in settings.options if option.startswith(_EXCLUDE)]
    left_out = ",".join((*exclude, *(option.removeprefix(_EXCLUDE) for option in own)))
    first, count = component.first, len(component.machines)
    name = _NOT_IN_NAMES.sub("-", f"atoll-{instance}")[:100]
    asked = [
        f"--job-name={name}",
        f"--comment={quote_directive(comment)}",
        f"--partition={','.join(choice.partitions)}" if choice.partitions else "",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--gres={choice.gres}:{first.gpus}" if first.gpus else "",
        *_ask_cpus(choice, settings),
        f"--nodelist={first.host}" if first.host else "",
        f"--account={settings.account}" if settings.account else "",
        f"--qos={settings.qos}" if settings.qos else "",
        f"--constraint={quote_directive(settings.constraint)}" if settings.constraint else "",
        f"--time={settings.time_limit_minutes}" if settings.time_limit_minutes else "",
        f"--signal=B:USR1@{settings.notice_s}" if settings.notice_s else "",
        # Started again by Slurm it would be an instance that nobody ordered.
        "--no-requeue",
        # What is in the controller's environment is nobody's business on the nodes.
        "--export=NONE",
        f"{_EXCLUDE}{left_out}" if left_out else "",
        *(option for option in settings.options if option not in own),
    ]
    return [f"#SBATCH {option}" for option in asked if option]


def _ask_cpus(choice: GpuChoice, settings: SlurmSettings) -> list[str]:
    """Return the option for CPUs: one alone, which is what Slurm gives otherwise, starves an engine."""
    said = any(option.startswith(_CPU_OPTIONS) for option in settings.options)
    return [f"--cpus-per-task={choice.cpus}"] if choice.cpus and not said else []


def _step(
    group: int | None,
    relative: int,
    choice: GpuChoice,
    machine: JobMachine,
    settings: SlurmSettings,
    home: str,
) -> str:
    # The job has `--export=NONE`, which steps would inherit: they need what its modules have set.
    words = ["srun", "--export=ALL", "--nodes=1", "--ntasks=1", f"--relative={relative}"]
    words += [f"--het-group={group}"] if group is not None else []
    words += [f"--gres={choice.gres}:{machine.gpus}"] if machine.gpus else []
    # A step does not inherit it.
    words += _ask_cpus(choice, settings)
    text = write_machine(machine.commands, settings, home, is_step=True)
    return f"{shlex.join([*words, 'bash', '-c', text])} &\npids+=($!) names+=(step)"


_BEGIN = """\
pids=() names=() told=
# Drained twice it would stop at once, so that an order may be given again.
forward() {
  if [ "$1" = TERM ]; then [ -z "$told" ] || return; told=1; fi
  @FORWARD@
}
trap 'forward TERM' TERM
trap 'forward USR1' USR1
stands() { for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || return 1; done; }
runs() { for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null && return 0; done; return 1; }
# A trapped signal ends `wait` at once; asking every second needs no newer bash.
look() { sleep 1 & wait $!; heed; }"""

_END = """\
while stands; do look; done
for i in "${!pids[@]}"; do
  kill -0 "${pids[$i]}" 2>/dev/null && continue
  wait "${pids[$i]}"; code=$?
  tell "${names[$i]}" "$code"
  [ "$code" = 0 ] || break
done
# An instance stands with all of its nodes or not at all.
if runs; then forward TERM; fi
while runs; do look; done
exit "$code\""""

_FORWARD = 'for pid in "${pids[@]}"; do kill -s "$1" "$pid" 2>/dev/null; done; :'
_TELL = f'tell() {{ echo "ended $2" >> "$home/$1{STATE_SUFFIX}"; }}'
_HEED = f"""\
heard=0
heed() {{
  mapfile -t said < "$home/{SIGNAL_FILE}"
  while [ "$heard" -lt "${{#said[@]}}" ]; do forward "${{said[$heard]}}"; heard=$((heard + 1)); done
}}"""

_SLICE = """\
slice() {  # the GPUs from the $1-th on, $2 of them, of those that Slurm gave
  local given
  IFS=, read -ra given <<< "${CUDA_VISIBLE_DEVICES:-}"
  if [ "${#given[@]}" = 0 ]; then seq -s, "$1" "$(($1 + $2 - 1))"; return; fi
  local IFS=,
  echo "${given[*]:$1:$2}"
}"""


def write_machine(
    commands: Sequence[NodeCommand], settings: SlurmSettings, home: str, *, is_step: bool = False
) -> str:
    """Return what one machine runs: its commands, signals for them, and what became of them."""
    lines = [f"home={shlex.quote(home)}"] if is_step else []
    lines += [_BEGIN.replace("@FORWARD@", _FORWARD), _TELL, _HEED if is_step else "heed() { :; }"]
    several = len(commands) > 1
    lines += [_SLICE] if several else []
    offset = 0
    for command in commands:
        visible = f'export CUDA_VISIBLE_DEVICES="$(slice {offset} {command.gpus})"'
        lines.append(_write_command(command, settings, home, visible if several else ""))
        offset += command.gpus
    return "\n".join([*lines, _END])


def _write_command(command: NodeCommand, settings: SlurmSettings, home: str, visible: str) -> str:
    argv = _name_programs(command.argv, settings)
    state = f'"$home"/{shlex.quote(command.node + STATE_SUFFIX)}'
    log = f'"$home"/{shlex.quote(command.node + LOG_SUFFIX)}'
    python = shlex.quote(settings.python)
    secrets = {name: f"{home}/{SECRETS}/{command.node}.{name}" for name, _ in command.secrets}
    # Told of the end, `atoll join` says so to gateways; whatever else stands here would die of the signal.
    lines = ["trap '' USR1", *([visible] if visible and command.gpus else [])]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in (*command.env, *secrets.items())]
    if any(PORT in word for word in argv):
        lines += [
            f"port=$({python} -c {shlex.quote(_CHOOSE_PORT)}) || exit",
            # This shell is replaced by the command; what waits for its port must not be a child of it.
            "self=$BASHPID",
            f'({python} -c {shlex.quote(_AWAIT_READY)} "$self" "$port" {state} {log} &)',
        ]
    else:
        lines.append(f"echo ready >> {state}")
    lines.append(f"exec {' '.join(map(_quote_word, argv))}")
    inner = "\n  ".join(lines)
    return f"(\n  {inner}\n) >> {log} 2>&1 &\npids+=($!) names+=({shlex.quote(command.node)})"


def _name_programs(words: Sequence[str], settings: SlurmSettings) -> list[str]:
    """Return a command with what `atoll` and `python3` are on nodes, also where they come after a "--"."""
    named: list[str] = []
    for before, word in zip(("--", *words), words, strict=False):
        if before == "--" and word == "atoll":
            named += settings.atoll
        elif before == "--" and word == "python3":
            named.append(settings.python)
        else:
            named.append(word)
    return named


def _quote_word(word: str) -> str:
    """Return an argument for bash, with the port in the places of {port}."""
    return '"$port"'.join(shlex.quote(part) if part else "" for part in word.split(PORT)) or "''"


def quote_directive(text: str) -> str:
    """Return a value as sbatch reads it in a script: in single quotes, with backslashes doubled."""
    if "'" in text or not text.isprintable():
        raise DeployError(f"{text[:60]!r} cannot stand in a batch script", kind="settings")
    return "'" + text.replace("\\", "\\\\") + "'"


def _check(order: StartOrder) -> None:
    """Refuse what no script could carry."""
    for command in order.commands:
        if not command.argv:
            raise DeployError(f"{command.node} has no command", kind="settings")
        if _NOT_IN_NAMES.search(command.node) or command.node.startswith("."):
            raise DeployError(f"{command.node!r} cannot be the name of a file", kind="settings")
        named: Mapping[str, str] = {**dict(command.env), **dict(command.secrets)}
        for name in named:
            if _VARIABLE.fullmatch(name) is None:
                raise DeployError(f"{name!r} is not an environment variable", kind="settings")
        if any("\0" in word for word in (*command.argv, *named.values())):
            raise DeployError(f"a word of {command.node} holds a zero byte", kind="settings")
