"""Believable data for pages: what a gateway and a planner of a small lab would say."""

from __future__ import annotations

import math
import random
import time
from typing import Any

Json = dict[str, Any]
GIB = 2**30
MODELS = ("qwen3-32b", "llama-3.1-8b", "gemma-3-27b")
BUDGETS = [
    {
        "key": None,
        "name": None,
        "owner": "ada@lab.example",
        "usd_per_month": 50.0,
        "spent_usd": 44.0,
        "level": "warning",
    },
    {
        "key": None,
        "name": None,
        "owner": None,
        "usd_per_month": 500.0,
        "spent_usd": 120.0,
        "level": "info",
    },
]
PROMISES = {
    "qwen3-32b": {"ttft_s": 1.0, "tpot_s": 0.05, "target": 0.95},
    "llama-3.1-8b": {"ttft_s": 0.5, "tpot_s": 0.03, "target": 0.99},
    "gemma-3-27b": None,
}
_MACHINES: tuple[tuple[str, str, str, str, int, int, str, float], ...] = (
    # name, site, region, gpu, count, memory of one in GiB, model, dollars an hour
    ("gpu1", "lab", "eu-west-1", "A100", 2, 80, "qwen3-32b", 3.1),
    ("gpu2", "lab", "eu-west-1", "A100", 2, 80, "qwen3-32b", 3.1),
    ("gpu3", "basel", "eu-central-2", "L40S", 4, 48, "qwen3-32b", 4.4),
    ("gpu4", "basel", "eu-central-2", "L4", 1, 24, "llama-3.1-8b", 0.8),
    ("gpu5", "cloud", "us-east-2", "L4", 1, 24, "llama-3.1-8b", 0.7),
    ("gpu6", "cloud", "us-east-2", "H100", 1, 80, "gemma-3-27b", 2.9),
)
_LAYERS = {"gpu1": [0, 40], "gpu2": [40, 64], "gpu3": [0, 64], "gpu4": [0, 32], "gpu5": [0, 32]}
_PROVIDERS = {"lab": "ETH", "basel": "University of Basel", "cloud": "rented"}


def make_machines(now_s: float) -> list[Json]:
    """Return six machines as the gateway has them."""
    rng = random.Random(3)
    machines = []
    for name, site, region, gpu, count, memory, model, usd in _MACHINES:
        state = "down" if name == "gpu5" else "up"
        machines.append(
            {
                "id": f"{site}/{name}",
                "name": name,
                "role": "node",
                "provider": _PROVIDERS[site],
                "verified": site != "cloud",
                "region": region,
                "site": site,
                "gpus": [{"type": gpu, "count": count, "memory_bytes": memory * GIB}],
                "cpus": 32,
                "memory_bytes": 256 * GIB,
                "services": [
                    {
                        "model": model,
                        "layers": _LAYERS.get(name, [0, 62]),
                        "precision": "fp8" if model == "qwen3-32b" else "bf16",
                        "context": 32768,
                    }
                ],
                "load": {
                    "running": rng.randrange(1, 9),
                    "waiting": 0,
                    "capacity": 64,
                    "kv_share": round(rng.uniform(0.1, 0.8), 2),
                },
                "state": state,
                "reason": "connection refused" if state == "down" else "",
                "since_s": now_s - rng.uniform(3600, 5 * 86400),
                "ends_s": now_s + 7200 if name == "gpu6" else None,
                "usd_per_hour": usd,
                "engine": "vllm 0.32" if gpu != "L4" else "llama.cpp b6000",
                "stability": "spot" if site == "cloud" else "standard",
                "requests": rng.randrange(1000, 90000),
                "failures": rng.randrange(0, 12),
                "instance": {"gpu1": "chat-1", "gpu2": "chat-1"}.get(name, f"{model}-{name}"),
                "fleet": "lab",
                "drained": False,
                "can_drain": True,
            }
        )
    return machines


PIPELINES = [
    {
        "model": "qwen3-32b",
        "instance": "chat-1",
        "layers": 64,
        "stages": [
            {"machine": "lab/gpu1", "layers": [0, 40]},
            {"machine": "lab/gpu2", "layers": [40, 64]},
        ],
    }
]


def make_models(machines: list[Json]) -> list[Json]:
    """Return the models with who serves them."""
    takes = {
        "qwen3-32b": ["text"],
        "llama-3.1-8b": ["text"],
        "gemma-3-27b": ["text", "image", "audio"],
    }
    found: list[Json] = []
    for model in MODELS:
        offers = [
            {
                "machine": m["id"],
                "name": m["name"],
                "provider": m["provider"],
                "verified": m["verified"],
                "region": m["region"],
                "gpus": f"{m['gpus'][0]['count']}x{m['gpus'][0]['type']}",
                "precision": m["services"][0]["precision"],
                "context": 32768,
                "kind": "vllm",
                "state": m["state"],
                "running": m["load"]["running"],
                "usd_per_mtoken_in": None,
                "usd_per_mtoken_out": None,
                "usd_per_hour": m["usd_per_hour"],
                "mean_s": 2.2,
                "first_token_s": 0.4,
            }
            for m in machines
            if m["services"][0]["model"] == model
        ]
        found.append(
            {
                "name": model,
                "aliases": ["mini"] if model == "llama-3.1-8b" else [],
                "choice": None,
                "takes": takes[model],
                "makes": ["text"],
                "promise": PROMISES[model],
                "context": 32768,
                "stand_in": None,
                "offers": offers,
            }
        )
    found.append(
        {
            "name": "chat",
            "aliases": [],
            "choice": {"shares": {"llama-3.1-8b": 0.7, "qwen3-32b": 0.3}},
            "takes": ["text"],
            "makes": ["text"],
            "promise": None,
            "context": 32768,
            "stand_in": None,
            "offers": [],
        }
    )
    return found


def make_snapshot(machines: list[Json], version: int, started_s: float) -> Json:
    """Return how it stands now; rates go up and down with the minutes."""
    now_s = time.time()
    models = []
    for at, name in enumerate(MODELS):
        wave = 1.0 + 0.5 * math.sin(now_s / 23.0 + 2 * at) + 0.08 * math.sin(now_s / 1.7 + at)
        rate = (3.8, 9.5, 1.1)[at] * wave
        serving = [m for m in machines if m["services"][0]["model"] == name]
        judged = int(300 * rate) if PROMISES[name] else 0
        share = (0.974, 0.982, 0.0)[at]
        models.append(
            {
                "name": name,
                "backends": len(serving),
                "up": sum(m["state"] == "up" for m in serving),
                "running": int(rate * 2),
                "requests_per_s": rate,
                "input_tokens_per_s": rate * 1080.0,
                "output_tokens_per_s": rate * 208.0,
                "first_token_s": 0.25 + 0.1 * wave,
                "token_s": 0.022 + 0.008 * wave,
                "usd_per_mtoken": (2.1, 0.31, 3.4)[at] / wave,
                "promise": PROMISES[name],
                "now": {"judged": judged, "kept": int(judged * share)},
                "day": {
                    "judged": 90211 if judged else 0,
                    "kept": int(90211 * share) if judged else 0,
                },
            }
        )
    return {
        "time_s": now_s,
        "status": "serving",
        "uptime_s": now_s - started_s + 8123.4,
        "running": sum(m["running"] for m in models),
        "connections": 40,
        "version": version,
        "backends_up": sum(m["state"] == "up" for m in machines),
        "backends": len(machines),
        "usd_per_hour": sum(m["usd_per_hour"] or 0.0 for m in machines if m["state"] == "up"),
        "models": models,
        "alarms": [
            {
                "id": "backend-down:cloud/gpu5",
                "level": "error",
                "what": "backend cloud/gpu5 does not answer: connection refused",
                "fix": "look at its log, or remove it with DELETE /atoll/v1/backends/cloud/gpu5",
                "since_s": started_s - 900.0,
            },
            {
                "id": "promise:llama-3.1-8b",
                "level": "warning",
                "what": "llama-3.1-8b keeps 98.2 % of its promises, 99 % are wanted",
                "fix": "add a machine, or ask what-if which one is cheapest",
                "since_s": started_s - 200.0,
            },
        ],
    }


def make_key(number: int, name: str, now_s: float, **changes: Any) -> Json:
    """Return a key as the gateway lists it."""
    rng = random.Random(number)
    month = rng.randrange(200_000, 9_000_000)
    key: Json = {
        "id": f"k{number:011d}",
        "name": name,
        "owner": None,
        "role": "member",
        "state": "active",
        "models": [],
        "requests_per_min": None,
        "tokens_per_min": None,
        "tokens_per_day": None,
        "tokens_per_month": None,
        "tokens_total": None,
        "concurrent": None,
        "policy": None,
        "track": True,
        "expires_s": None,
        "created_s": now_s - number * 86400.0,
        "revoked_s": None,
        "used": {
            "today": {"tokens": month // 25},
            "month": {"tokens": month},
            "total": {"tokens": month * 3},
        },
    }
    key.update({name: value for name, value in changes.items() if value is not None})
    return key


def make_keys(now_s: float) -> list[Json]:
    """Return the keys of a lab."""
    return [
        make_key(1, "notebook", now_s, owner="ada@lab.example", tokens_per_day=400_000),
        make_key(2, "pipeline", now_s, owner="ada@lab.example", requests_per_min=60),
        make_key(
            3,
            "grading",
            now_s,
            owner="kurt@lab.example",
            tokens_per_month=5_000_000,
            models=["llama-*"],
        ),
        make_key(4, "finance", now_s, owner="eve@lab.example", role="viewer"),
        make_key(
            5, "old laptop", now_s, owner="kurt@lab.example", state="revoked", revoked_s=now_s - 9e5
        ),
    ]


def make_usage(by: list[str], keys: list[Json], now_s: float) -> list[Json]:
    """Return thirty days of usage, summed by some of its columns."""
    rng = random.Random(11)
    sums: dict[tuple[str, ...], Json] = {}
    for back in range(29, -1, -1):
        day = time.strftime("%Y-%m-%d", time.gmtime(now_s - back * 86400))
        weekend = time.gmtime(now_s - back * 86400).tm_wday >= 5
        for model in MODELS:
            for key in keys[:4]:
                requests = int(rng.uniform(50, 400) * (0.3 if weekend else 1.0))
                row = {
                    "day": day,
                    "model": model,
                    "key": key["name"],
                    "owner": key["owner"] or "",
                    "provider": rng.choice(list(_PROVIDERS.values())),
                    "node": rng.choice(_MACHINES)[0],
                    "outcome": "ok",
                }
                at = tuple(str(row[column]) for column in by)
                found = sums.setdefault(
                    at,
                    {
                        **{column: row[column] for column in by},
                        "requests": 0,
                        "prompt_tokens": 0,
                        "completion_tokens": 0,
                        "audio_seconds": 0.0,
                        "speech_seconds": 0.0,
                        "image_pixels": 0,
                        "cost_usd": 0.0,
                    },
                )
                found["requests"] += requests
                found["prompt_tokens"] += requests * 1110
                found["completion_tokens"] += requests * 148
                found["cost_usd"] = round(found["cost_usd"] + requests * 0.0014, 4)
    return list(sums.values())


def make_plan(factor: float = 1.0) -> Json:
    """Return a plan; with a factor, of so much more demand."""
    chats = max(1, round(2 * factor))
    instances: list[Json] = [
        {
            "id": f"chat-{at + 1}",
            "service": "chat",
            "region": "aws/us-east-2",
            "market": "on-demand",
            "layout": "2x L40S:4",
            "usd_per_hour": 4.6,
            "share": 1 / chats,
            "capacity_per_s": 2.4,
            "stages": [
                {"node": "L40S:4", "gpus": 4, "gpu": "L40S", "layers": [0, 32], "tp": 4},
                {"node": "L40S:4", "gpus": 4, "gpu": "L40S", "layers": [32, 64], "tp": 4},
            ],
            "engine": "vllm",
            "standing": "tested",
        }
        for at in range(chats)
    ]
    small = max(1, round(3 * factor))
    instances += [
        {
            "id": f"small-{at + 1}",
            "service": "small",
            "region": "aws/eu-west-1",
            "market": "spot",
            "layout": "L4:1",
            "usd_per_hour": 0.8,
            "share": 1 / small,
            "capacity_per_s": 4.1,
            "stages": [{"node": "L4:1", "gpus": 1, "gpu": "L4", "layers": [0, 32], "tp": 1}],
            "engine": "vllm",
            "standing": "served",
        }
        for at in range(small)
    ]
    usd = round(sum(i["usd_per_hour"] for i in instances), 2)
    rates = {"chat": 4.0 * factor, "small": 9.5 * factor}
    return {
        "hash": f"9f2c{chats}{small}",
        "fleet": "lab",
        "solver": "optimal",
        "status": "optimal",
        "objective": "cost",
        "usd_per_hour": usd,
        "bound_usd_per_hour": round(usd * 0.9993, 2),
        "gap": 0.0007,
        "proof": {
            "gap": "0.07%",
            "bound": "Bound by the capacity model: nothing within its settings costs less.",
            "late": None,
        },
        "services": [
            {
                "name": name,
                "model": model,
                "requests_per_s": rates[name],
                "ttft_s": ttft,
                "tpot_s": tpot,
                "target": 0.95,
                "kept": 0.97,
                "usd_per_hour": sum(i["usd_per_hour"] for i in instances if i["service"] == name),
                "usd_per_mtoken": per,
                "input_tokens": 1155,
                "output_tokens": 211,
            }
            for name, model, ttft, tpot, per in (
                ("chat", "qwen3-32b", 4.0, 0.1, 1.9),
                ("small", "llama-3.1-8b", 1.0, 0.05, 0.4),
            )
        ],
        "instances": instances,
        "flows": [
            {
                "from": f"demand:{i['service']}",
                "to": f"instance:{i['id']}",
                "share": i["share"],
                "per_s": i["share"] * rates[i["service"]],
            }
            for i in instances
        ],
        "binds": [
            {
                "what": "12 of 16 L4 in aws/eu-west-1 are taken",
                "price": "one more would save $0.20/h",
            },
            {
                "what": "chat must keep its first token within 4 s",
                "price": "5 s would save $0.90/h",
            },
        ],
    }


def make_history(now_s: float) -> list[Json]:
    """Return what was decided in the last day."""
    rows = (
        (86000, "controller", "begins to operate", None, None),
        (85990, "plan", "a new plan: demand of chat rose from 3.1 to 4.0 requests/s", None, 10.8),
        (85980, "start", "chat-2 starts: capacity for 0.9 requests/s is missing", "chat-2", 11.6),
        (60300, "failure", "small-3 does not answer: the machine was taken back", "small-3", 11.6),
        (60290, "start", "small-3 starts again in aws/eu-west-1", "small-3", 11.6),
        (
            30500,
            "reweight",
            "chat-1 60 %, chat-2 40 %: chat-1 is faster than predicted",
            None,
            11.6,
        ),
        (7300, "plan", "a new plan: L4 spot in aws/eu-west-1 fell from $0.90 to $0.80", None, 11.3),
        (7200, "drain", "small-1 drains: small-4 is cheaper", "small-1", 11.3),
        (7100, "stop", "small-1 has ended", "small-1", 11.3),
        (60, "note", "the fleet file has changed", None, 11.3),
    )
    return [
        {
            "at_s": now_s - ago,
            "kind": kind,
            "text": text,
            "term": 4,
            "instance": instance,
            "plan": "9f2c23" if kind == "plan" else None,
            "usd_per_hour": usd,
        }
        for ago, kind, text, instance, usd in rows
    ]


def make_next(now_s: float) -> Json:
    """Return a change that waits for approval."""
    return {
        "id": "c41d",
        "at_s": now_s - 40.0,
        "state": "waiting",
        "stays": ["chat-1", "small-2", "small-3"],
        "starts": [
            {
                "instance": "small-5",
                "target": "aws/us-east-2",
                "layout": "L4:1",
                "usd_per_hour": 0.7,
                "reason": "cheaper than small-4 by $0.10/h",
            }
        ],
        "goes": [
            {
                "instance": "chat-2",
                "target": "aws/us-east-2",
                "layout": "L40S:4",
                "usd_per_hour": 4.6,
                "reason": "demand fell to 2.1 requests/s",
            }
        ],
        "stops": [],
        "usd_before": 11.6,
        "usd_after": 7.7,
        "dips": ["none: small-5 serves before small-4 drains"],
        "reasons": ["demand of chat is forecast at 2.1 requests/s for the next hour"],
        "waits": ["small-5 needs 4 min to load its weights"],
    }


DIALS: Json = {
    "fleet": "lab",
    "services": [
        {
            "name": "chat",
            "model": "qwen3-32b",
            "requests_per_s": 4.0,
            "ttft_s": 4.0,
            "tpot_s": 0.1,
            "target": 0.95,
        },
        {
            "name": "small",
            "model": "llama-3.1-8b",
            "requests_per_s": 9.5,
            "ttft_s": 1.0,
            "tpot_s": 0.05,
            "target": 0.95,
        },
    ],
    "gpus": [
        {
            "gpu": "L40S",
            "nodes": 48,
            "usd_per_gpu_hour": 1.1,
            "regions": ["aws/us-east-2"],
            "markets": ["on-demand"],
        },
        {
            "gpu": "L4",
            "nodes": 16,
            "usd_per_gpu_hour": 0.8,
            "regions": ["aws/eu-west-1"],
            "markets": ["spot"],
        },
    ],
    "usd_per_hour": 11.6,
    "kind": "rented",
}

TRACES: list[Json] = [
    {
        "id": "azure-conv",
        "name": "azure-conv",
        "kind": "builtin",
        "requests": None,
        "seconds": None,
        "text": "an hour of conversations with a public service",
    },
    {
        "id": "burst",
        "name": "burst",
        "kind": "builtin",
        "requests": None,
        "seconds": None,
        "text": "calm, then five times the demand for ten minutes",
    },
]

REPORT = (
    """<!doctype html><meta charset="utf-8"><title>Report</title>
<style>body{font:16px system-ui;margin:2em}rect{fill:#2a78b8}</style>
<h1>lab under azure-conv</h1><p id="kept">97 % of 2,400 requests kept their promise.</p>
<svg width="300" height="80">"""
    + "".join(
        f'<rect x="{at * 12}" y="{80 - height}" width="10" height="{height}"/>'
        for at, height in enumerate((20, 30, 44, 60, 71, 66, 50, 41, 35, 30, 28, 33))
    )
    + "</svg><script>document.getElementById('kept').title='drawn in the browser'</script>"
)


def make_history_curves(query: dict[str, str]) -> Json:
    """Curves as the gateway has them, with a gap in the middle and two changes."""
    since_s, until_s = float(query["since_s"]), float(query["until_s"])
    step_s = max(10, round((until_s - since_s) / 100))
    first = int(since_s // step_s * step_s)
    at_s = list(range(first, int(until_s), step_s))
    kind = query.get("of", "models")
    figures = {
        "models": {
            "requests_per_s": 3.0,
            "input_tokens_per_s": 3000.0,
            "output_tokens_per_s": 700.0,
            "first_token_s": 0.4,
            "token_s": 0.03,
            "kept": 0.9,
            "usd_per_hour": 4.0,
        },
        "machines": {
            "running": 12.0,
            "load": 0.5,
            "kv_share": 0.4,
            "gpu_share": 0.8,
            "memory_share": 0.7,
        },
    }[kind]
    gap = range(len(at_s) // 2, len(at_s) // 2 + 5)
    series = [
        {"name": name}
        | {
            figure: [
                None if at in gap else round(usual * (1.0 + 0.1 * ((at * (n + 3)) % 7) / 7.0), 5)
                for at in range(len(at_s))
            ]
            for figure, usual in figures.items()
        }
        for n, name in enumerate(MODELS if kind == "models" else ("gpu1", "gpu2", "gpu3"))
    ]
    changes = [
        {"at_s": since_s + 0.3 * (until_s - since_s), "text": "another plan is in force"},
        {"at_s": since_s + 0.6 * (until_s - since_s), "text": "machine gpu2 joined"},
    ]
    return {"of": kind, "step_s": step_s, "at_s": at_s, "series": series, "changes": changes}


def make_requests(now_s: float) -> list[Json]:
    """The last requests, the newest first."""
    return [
        {
            "id": f"req-{n}",
            "trace": f"{n:032x}",
            "model": list(MODELS)[n % len(MODELS)],
            "endpoint": "/v1/chat/completions",
            "stream": True,
            "status": 502 if n == 2 else 200,
            "outcome": ("ok", "ok", "error", "cancelled")[n % 4],
            "prompt_tokens": 120 + n,
            "completion_tokens": 64,
            "started_s": now_s - 12.0 * n - 5.0,
            "seconds": 2.4,
            "first_token_s": None if n == 2 else 0.6,
            "backend": "lab/gpu1",
            "attempts": 2 if n == 1 else 1,
        }
        for n in range(8)
    ]


def make_request(name: str, now_s: float) -> Json | None:
    """One of them with its spans."""
    found = next((one for one in make_requests(now_s) if one["id"] == name), None)
    if found is None:
        return None
    spans = [
        ("gateway", "/v1/chat/completions qwen3-32b", 0.0, 2.4),
        ("wait", "waits for a machine", 0.0, 0.05),
        ("prefill", "lab/gpu2", 0.05, 0.4),
        ("decode", "lab/gpu1", 0.45, 1.95),
        ("first", "until the first token", 0.45, 0.15),
        ("tokens", "further tokens", 0.6, 1.8),
        ("executor", "speaker on gpu3", 0.9, 0.7),
    ]
    return found | {
        "spans": [
            {"kind": kind, "name": text, "start_s": start, "seconds": seconds, "failed": False}
            for kind, text, start, seconds in spans
        ]
    }


FLEET_FILE = """\
name: lab
services:
  chat: {model: qwen3-32b, ttft: 4s, tpot: 100ms, rate: 4/s, lengths: azure-conv}
  small: {model: llama-3.1-8b, ttft: 1500ms, tpot: 60ms, rate: 9.5/s, lengths: azure-conv}
pool:
  cloud: {regions: [aws/us-east-2], gpus: [L4, L40S]}
"""
SERVICES = {
    "chat": {
        "model": "qwen3-32b",
        "ttft": "4s",
        "tpot": "100ms",
        "rate": "4/s",
        "lengths": "azure-conv",
    },
    "small": {
        "model": "llama-3.1-8b",
        "ttft": "1500ms",
        "tpot": "60ms",
        "rate": "9.5/s",
        "lengths": "azure-conv",
    },
}
MODELS_TO_DEPLOY = [
    {
        "name": name,
        "hf_id": hf_id,
        "params": params,
        "active_params": params,
        "weight_bytes": 2.0 * params,
        "context": 32768,
        "kinds": ["llm"],
        "is_text": True,
        "precisions": [],
        "has_weights": True,
    }
    for name, hf_id, params in (
        ("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360),
        ("qwen3-32b", "Qwen/Qwen3-32B", 32_762_123_264),
    )
]
INVITATIONS = [
    {"name": "gpu5", "made_s": 1.79e9, "expires_s": 1.8e9, "state": "good"},
    {"name": "gpu4", "made_s": 1.78e9, "expires_s": 1.79e9, "state": "expired"},
]
