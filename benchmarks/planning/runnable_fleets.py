"""Fleets as different users would write them, to see whether what is planned for them runs."""

from __future__ import annotations

FLEETS: dict[str, str] = {
    "twelve models over five GPU types and four regions, with spot": """\
services:
  chat-70b: {model: llama-3.3-70b@fp8, ttft: 2s, tpot: 80ms, rate: 2/s, lengths: azure-conv}
  chat-8b: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 8/s, lengths: azure-conv}
  fast-3b: {model: llama-3.2-3b, ttft: 500ms, tpot: 25ms, rate: 10/s, lengths: 256x128}
  tiny-1b: {model: llama-3.2-1b, ttft: 500ms, tpot: 25ms, rate: 10/s, lengths: 256x64}
  qwen-32b: {model: qwen3-32b, ttft: 3s, tpot: 100ms, rate: 1/s, lengths: azure-code}
  qwen-14b: {model: qwen3-14b, ttft: 2s, tpot: 80ms, rate: 2/s, lengths: 512x256}
  qwen-8b: {model: qwen3-8b, ttft: 1s, tpot: 50ms, rate: 3/s, lengths: 512x256}
  qwen-moe: {model: qwen3-30b-a3b, ttft: 2s, tpot: 60ms, rate: 2/s, lengths: 512x256}
  code-20b: {model: gpt-oss-20b, ttft: 2s, tpot: 60ms, rate: 3/s, lengths: azure-code}
  phi: {model: phi-4-14b, ttft: 2s, tpot: 80ms, rate: 2/s, lengths: 512x128}
  gemma: {model: gemma-3-12b, ttft: 2s, tpot: 80ms, rate: 1/s, lengths: 512x128}
  mistral: {model: mistral-small-3.2-24b, ttft: 3s, tpot: 100ms, rate: 1/s, lengths: 512x128}
pool:
  offers:
    - {region: aws/us-east-1, node_type: L4:1, available: 16, usd_per_hour: 0.80}
    - {region: aws/us-east-1, node_type: L4:1, market: spot, available: 8, usd_per_hour: 0.32}
    - {region: aws/us-east-1, node_type: A10G:4, available: 8, usd_per_hour: 5.67}
    - {region: aws/us-west-2, node_type: L40S:4, available: 8, usd_per_hour: 10.49}
    - {region: aws/us-west-2, node_type: L40S:1, market: spot, available: 8, usd_per_hour: 0.75}
    - {region: gcp/europe-west4, node_type: A100-80:2, available: 4, usd_per_hour: 10.2}
    - {region: gcp/asia-east1, node_type: H100:8, available: 2, usd_per_hour: 88.0}
limits: {spot_share: 50%}
""",
    "home: a 4090 and a 3090": """\
services:
  chat: {model: qwen3-32b@int4, ttft: 5s, tpot: 150ms, rate: 0.05/s, lengths: 1024x256}
pool:
  owned:
    home: {RTX4090:1: 1, RTX3090:1: 1}
""",
    "home: two 3090s and a T4 for a 14B": """\
services:
  chat: {model: qwen3-14b, ttft: 5s, tpot: 150ms, rate: 0.2/s, lengths: 512x256}
pool:
  owned:
    home: {RTX3090:1: 2, T4:1: 1}
""",
    "a lab with A100 and V100": """\
services:
  chat: {model: llama-3.1-8b, ttft: 2s, tpot: 100ms, rate: 3/s, lengths: azure-conv}
  big: {model: llama-3.3-70b, ttft: 4s, tpot: 150ms, rate: 0.5/s, lengths: 512x256}
pool:
  owned:
    lab: {A100-40:4: 2, V100-16:1: 8}
""",
    "V100 machines alone": """\
services:
  chat: {model: llama-3.1-8b, ttft: 3s, tpot: 150ms, rate: 1/s, lengths: 512x128}
pool:
  owned:
    lab: {V100-16:1: 8}
""",
    "DeepSeek-V3 on two H200 boxes": """\
services:
  chat: {model: deepseek-v3, ttft: 5s, tpot: 150ms, rate: 0.5/s, lengths: 1024x256}
pool:
  owned:
    dc: {H200:8: 2}
""",
    "MI300X boxes": """\
services:
  chat: {model: llama-3.3-70b, ttft: 2s, tpot: 60ms, rate: 4/s, lengths: azure-conv}
  code: {model: qwen3-32b, ttft: 3s, tpot: 80ms, rate: 1/s, lengths: azure-code}
pool:
  owned:
    dc: {MI300X:8: 1}
""",
    "prompts of 60,000 tokens": """\
services:
  read: {model: llama-3.1-8b, ttft: 60s, tpot: 100ms, rate: 0.05/s, lengths: 60000x500}
pool:
  offers:
    - {region: here, node_type: H100:1, available: 4, usd_per_hour: 4.0}
    - {region: here, node_type: L40S:4, available: 4, usd_per_hour: 10.49}
    - {region: here, node_type: A100-80:1, available: 4, usd_per_hour: 2.6}
""",
    "a quantised 70B on L40S": """\
services:
  chat: {model: llama-3.3-70b@fp8, ttft: 3s, tpot: 100ms, rate: 1/s, lengths: azure-conv}
pool:
  offers:
    - {region: here, node_type: L40S:4, available: 8, usd_per_hour: 10.49}
    - {region: here, node_type: L40S:8, available: 4, usd_per_hour: 30.13}
""",
    "gpt-oss on A10G": """\
services:
  code: {model: gpt-oss-20b, ttft: 3s, tpot: 80ms, rate: 1/s, lengths: azure-code}
pool:
  offers:
    - {region: here, node_type: A10G:1, available: 8, usd_per_hour: 1.01}
    - {region: here, node_type: A10G:4, available: 4, usd_per_hour: 5.67}
""",
    "an 8B on L4": """\
services:
  chat: {model: qwen3-8b, ttft: 2s, tpot: 80ms, rate: 1/s, lengths: 512x256}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 8, usd_per_hour: 0.8}
""",
    "many small models on T4": """\
services:
  a: {model: llama-3.2-1b, ttft: 1s, tpot: 60ms, rate: 2/s, lengths: 256x64}
  b: {model: llama-3.2-3b, ttft: 2s, tpot: 80ms, rate: 1/s, lengths: 256x64}
  c: {model: gemma-3-1b, ttft: 1s, tpot: 60ms, rate: 2/s, lengths: 256x64}
pool:
  offers:
    - {region: here, node_type: T4:1, available: 16, usd_per_hour: 0.53}
    - {region: here, node_type: T4:4, available: 4, usd_per_hour: 3.9}
""",
    "a 405B on eight H100 or more": """\
services:
  chat: {model: llama-3.1-405b@fp8, ttft: 6s, tpot: 200ms, rate: 0.3/s, lengths: 1024x256}
pool:
  offers:
    - {region: here, node_type: H100:8, available: 4, usd_per_hour: 88.0}
    - {region: here, node_type: H200:8, available: 2, usd_per_hour: 110.0}
""",
    "a 32B cut over single-GPU machines": """\
services:
  chat: {model: qwen3-32b, ttft: 3s, tpot: 120ms, rate: 1/s, lengths: azure-conv}
pool:
  offers:
    - {region: here, node_type: L40S:1, available: 8, usd_per_hour: 1.86}
    - {region: here, node_type: A10G:1, available: 8, usd_per_hour: 1.01}
""",
    "phases apart asked for": """\
services:
  chat: {model: llama-3.1-8b, ttft: 1s, tpot: 40ms, rate: 8/s, lengths: azure-conv, phases: apart}
pool:
  offers:
    - {region: here, node_type: L40S:1, available: 8, usd_per_hour: 1.86}
    - {region: here, node_type: L4:1, available: 8, usd_per_hour: 0.8}
""",
    "an FP8 cache of long conversations": """\
services:
  chat: {model: "qwen3-14b@kv=fp8", ttft: 4s, tpot: 80ms, rate: 1/s, lengths: 8000x400}
pool:
  offers:
    - {region: here, node_type: L40S:1, available: 8, usd_per_hour: 1.86}
    - {region: here, node_type: H100:1, available: 4, usd_per_hour: 4.0}
""",
    "Blackwell with four bits": """\
services:
  chat: {model: llama-3.3-70b@nvfp4, ttft: 2s, tpot: 50ms, rate: 3/s, lengths: azure-conv}
pool:
  offers:
    - {region: here, node_type: B200:1, available: 4, usd_per_hour: 6.0}
    - {region: here, node_type: RTXPRO6000:1, available: 4, usd_per_hour: 2.5}
""",
    "spot in three regions": """\
services:
  chat: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 10/s, lengths: azure-conv}
pool:
  offers:
    - {region: aws/us-east-1, node_type: L4:1, market: spot, available: 6, usd_per_hour: 0.3}
    - {region: aws/us-west-2, node_type: L40S:1, market: spot, available: 4, usd_per_hour: 0.8}
    - {region: gcp/us-central1, node_type: A100-40:1, market: spot, available: 4, usd_per_hour: 1.2}
    - {region: aws/us-east-1, node_type: L4:1, available: 8, usd_per_hour: 0.8}
""",
    "an MoE on what there is": """\
services:
  chat: {model: qwen3-30b-a3b, ttft: 2s, tpot: 60ms, rate: 2/s, lengths: azure-conv}
pool:
  owned:
    lab: {A6000:1: 4, RTX4090:1: 4}
""",
    "a MacBook alone": """\
services:
  chat: {model: llama-3.1-8b@q4_k_m, ttft: 5s, tpot: 150ms, rate: 0.05/s, lengths: 512x256}
pool:
  owned:
    home: {M3-Max-36:1: 1}
""",
    "a Mac Studio beside a 4090": """\
services:
  chat: {model: qwen3-30b-a3b@q4_k_m, ttft: 5s, tpot: 150ms, rate: 0.1/s, lengths: 1024x256}
  code: {model: gpt-oss-120b, ttft: 10s, tpot: 150ms, rate: 0.05/s, lengths: 1024x256}
pool:
  owned:
    home: {M2-Ultra-192:1: 1, RTX4090:1: 1}
""",
    "two 3090s in a machine for a 70B of GGUF weights": """\
services:
  chat: {model: llama-3.3-70b@q4_k_m, ttft: 20s, tpot: 300ms, rate: 0.01/s, lengths: 512x256}
pool:
  owned:
    home: {RTX3090:2: 1}
""",
    "only vLLM is allowed": """\
services:
  chat: {model: qwen3-32b, ttft: 3s, tpot: 100ms, rate: 2/s, lengths: azure-conv}
pool:
  offers:
    - {region: here, node_type: L40S:1, available: 8, usd_per_hour: 1.86}
    - {region: here, node_type: L40S:4, available: 4, usd_per_hour: 10.49}
    - {region: here, node_type: A10G:4, available: 8, usd_per_hour: 5.67}
settings: {engines: [vllm]}
""",
}
