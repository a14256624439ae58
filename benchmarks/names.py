"""All benchmarks by name: what each shows, the keys that others read, and what it needs beside `make test`.

`python -m benchmarks` runs them in this order; README.md's table is made of this one.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: its name, what it shows, keys of its last line, and what it needs.

    `quick_s` are about the seconds of `--quick` on two cores, until a run of it was recorded.
    """

    name: str
    shows: str
    keys: str
    quick_s: int
    needs: str = ""

    @property
    def path(self) -> Path:
        """The file that is run."""
        spec = importlib.util.find_spec(f"benchmarks.{self.name}")
        assert spec is not None, self.name
        assert spec.origin is not None, self.name
        return Path(spec.origin)

    @property
    def folder(self) -> str:
        """The subject it is filed under."""
        return self.path.parent.name


BENCHMARKS = (
    Benchmark(
        "first_run",
        "compiling before a first plan, placement and simulation; the demo",
        "plan_compile_cpu_s simulate_compile_cpu_s demo_cold_s demo_warm_s",
        90,
    ),
    Benchmark(
        "perf_accuracy",
        "errors of the performance model against public tables: operators, steps, published layers, experts",
        "gemm_median_max gemm_p95_max decode_attn_median_max prefill_attn_median_max"
        " allreduce_median_max step_decode_median step_decode_p95 step_prefill_median"
        " step_prefill_p95 helix_prefill_median_max helix_decode_median_max moe_step_median",
        60,
        "data, aic",
    ),
    Benchmark(
        "gpu_accuracy",
        "the same against what was measured on GPUs once: steps, layers, energy and encoders on an H200,"
        " batches on MI300X, Cornserve's table 1",
        "layer_median step_median layer_calibrated_median stack_joules_median graph_chains_median"
        " mi300x_new_median table1_median_ratio_err",
        10,
    ),
    Benchmark(
        "servers",
        "1,700 measured servers of vLLM, SGLang and TensorRT-LLM, simulated as shipped and with each series"
        " left out of what is fitted (`tools.fit_servers`)",
        "dense_tpot_left_out moe_tpot_left_out ttft_left_out gpu_ratio_left_out",
        60,
        "aic",
    ),
    Benchmark(
        "error_bars",
        "whether stated 90 % hold measured servers of GPUs, families and engines that were left out",
        "coverage_dense coverage_moe coverage_ttft width_median",
        180,
        "aic",
    ),
    Benchmark(
        "perf_speed",
        "how fast the performance model answers",
        "tables_cpu_s scalar_query_us",
        20,
    ),
    Benchmark(
        "gpu_promise",
        "promises of planned fleets as vLLM kept them on an H200, against the simulator, and with profiles of"
        " the servers (`gpu_promise_serve` serves them where a GPU is)",
        "cases kept_diff_max tpot_err_mean tpot_err_p95 ttft_err_mean ttft_err_p95 errors"
        " gateway_added_ms",
        60,
    ),
    Benchmark(
        "gpu_engine",
        "the stage engine beside vLLM on an H200: the same weights, arrivals and gateway; whole and in two"
        " stages (`gpu_engine_serve` serves them where a GPU is)",
        "tpot_ratio_8 tpot_ratio_16 ttft_ratio_8 ttft_ratio_16 saturated_tokens_ratio ready_s"
        " ready_again_s compiled_after_ready errors",
        5,
    ),
    Benchmark(
        "engine_h200",
        "the stage engine on a GPU: an 8B model whole and cut in two, as shares of the GPU's limits",
        "decode_b64_share_of_bw cut2_b64_share_of_bw prefill_share_of_peak",
        10,
        "a GPU",
    ),
    Benchmark(
        "templates",
        "1.1 million node multisets laid out, and whether optimally",
        "multisets templates_cpu_s ratio_highs ratio_gurobi ilp_checked ilp_equal brute_checked"
        " brute_equal",
        150,
        "reference",
    ),
    Benchmark(
        "allocation",
        "time to a proven gap, with plenty and with scarce nodes",
        "core_cpu_s core_gap extended_cpu_s extended_gap scarce_cpu_s scarce_gap scarce_edge_gap"
        " scarce_edge_cpu_s models48_cpu_s regions30_cpu_s deadline_overrun_s",
        150,
    ),
    Benchmark(
        "runnable",
        "whether what is planned runs: engines, commands, memory, and what that costs",
        "instances without_command not_parsed over_memory roundtrip_differs price_of_running_max"
        " price_of_running_median",
        120,
    ),
    Benchmark(
        "coral_costs",
        "Coral's figures 7 to 12: plans against Homo and Cauchy, as published and stronger, with free layouts"
        " and (`run_*`) those that engines run; a full run writes `results/coral.csv`",
        "core_vs_homo core_vs_cauchy extended_vs_homo extended_vs_cauchy large_vs_homo"
        " large_vs_cauchy small_vs_homo small_vs_cauchy scarce_goodput_vs_homo"
        " scarce_goodput_vs_cauchy",
        170,
    ),
    Benchmark(
        "fast_plan",
        "the fast solver: seconds, and how much dearer its plans are",
        "fast_cpu_s_48x3 fast_gap_median fast_gap_max",
        70,
    ),
    Benchmark(
        "promises",
        "plans sized by simulation keep what they promise",
        "kept_share_min cost_over_bound_max cpu_s_quickstart cpu_s_extended",
        100,
    ),
    Benchmark(
        "choice",
        "GH/AGH's joint problem: exact, greedy and ours by size, under stress, and over a day",
        "ours_gap_max ours_ms_202020 agh_gap_max milp_cpu_s_151510 robust_vs_milp_stress15"
        " robust_vs_agh_stress15 rolling_vs_static_sigma05",
        60,
    ),
    Benchmark(
        "scale",
        "placement on up to 10,000 nodes, 200 models rented in 30 regions, a fabric of 10,000 members,"
        " gateways with 50,000 streams; `--only placement`, `rent`, `members` or `streams`",
        "n200_gap n1000_gap rent200_gap rent200_cpu_s streams_active",
        170,
    ),
    Benchmark(
        "flow",
        "largest flows on Helix's clusters, and how the search scales",
        "single24 geo24 cluster42 cluster10 single24_bound cluster42_bound cluster10_proved cpu_s_max"
        " brute_checked brute_equal n200_gap n200_cpu_s n1000_gap n1000_cpu_s",
        170,
        "data",
    ),
    Benchmark(
        "helix_judge",
        "plans over Helix's placements by Helix's own event rules, with its router and ours",
        "single24_iwrr geo_iwrr cluster42_iwrr single24_ours geo_ours cluster42_ours latency_ratio_max",
        170,
        "data, reference",
    ),
    Benchmark(
        "helix_figures",
        "Helix's figures 6 to 12 in the simulator",
        "atoll_vs_helix_single24_offline atoll_vs_helix_geo24_offline"
        " atoll_vs_helix_cluster42_offline atoll_vs_helix_single24_online"
        " atoll_vs_helix_geo24_online atoll_vs_helix_cluster42_online",
        170,
        "data",
    ),
    Benchmark(
        "sustained",
        "sustained throughput beside Helix's, and how well it is predicted",
        "within15_of_18 within10_of_18 error_median",
        170,
        "data",
    ),
    Benchmark(
        "cp_placement",
        "OpenFabric's table 1 and figure 5: its placement, memP's and ours, simulated",
        "cp_vs_memp_throughput cp_vs_memp_latency atoll_vs_cp_latency",
        170,
        "reference",
    ),
    Benchmark(
        "sim_speed",
        "requests per CPU-second, and growth with requests and nodes",
        "requests_per_cpu_s compile_s rss_mb_1m growth_exponent_requests",
        60,
    ),
    Benchmark(
        "sim_vs_real",
        "the simulator against the stage engine on this machine, which must be quiet",
        "ttft_mean_err ttft_p95_err tpot_mean_err tpot_p95_err",
        150,
        "SmolLM2",
    ),
    Benchmark(
        "cells",
        "the planner of any-to-any models against trying everything and Cornserve",
        "exact_checked exact_equal alg2_worse_share omni8_vs_monolith omni16_vs_monolith"
        " figure2_winners_of_8 hetero_saving plan_cpu_s_max",
        150,
    ),
    Benchmark(
        "cells_sim",
        "latency of models in parts, static against dynamic routing",
        "p50_vs_monolith p99_vs_monolith static_vs_dynamic",
        60,
    ),
    Benchmark(
        "any_fleet",
        "a mixed fleet (chat, vision, speech) whose mix of classes shifts: draws of a virtual week beside an"
        " oracle, an autoscaler and one plan, hours in which a class is raised by 30 %, and the same live;"
        " `--week`, `--live`",
        "cost_vs_oracle kept_class_minus_target errors wrong_answers leaked sim_vs_served_err",
        170,
        "components",
    ),
    Benchmark(
        "operate",
        "a virtual week and six hard days: Atoll against static, reactive and rolling operators and an"
        " oracle; 40 services",
        "cost_vs_oracle cost_vs_reactive cost_vs_static_peak kept_share_minus_target"
        " kept_minus_reactive starts_vs_before below_demand_s virtual_days_per_cpu_s",
        170,
    ),
    Benchmark(
        "gateway",
        "CPU a request and a token, beside nginx and LiteLLM",
        "added_ms_p50 added_ms_p99 rps_per_cpu rps_per_cpu_litellm rps_per_cpu_nginx",
        120,
        "nginx, LiteLLM",
    ),
    Benchmark(
        "dashboard",
        "what pages cost and how long people wait for them",
        "first_paint_ms whatif_s pages200_gateway_cpu_share transfer_kb history_query_ms store_mb_30d",
        120,
        "chromium",
    ),
    Benchmark(
        "engine_cpu",
        "tokens per CPU-second of SmolLM2, whole and in stages",
        "tok_per_cpu_s_whole tok_per_cpu_s_2stage tok_per_cpu_s_3stage generate_batch_tok_per_cpu_s",
        90,
        "SmolLM2",
    ),
    Benchmark(
        "pacing",
        "pipelines free and paced, simulated and real",
        "sim_tpot_ratio_max real_tpot_ratio_2stage throughput_ratio_min capacity_promise_err_max",
        100,
        "SmolLM2",
    ),
    Benchmark(
        "fabric",
        "how quickly 40 processes agree who is there",
        "register_ms_p99 kill_ms_max silent_s_max heal_s late_join_s idle_cores",
        70,
    ),
    Benchmark(
        "tunnel",
        "what the tunnel adds to a token, beside plain HTTP",
        "added_ms_per_token_p50_c16 tokens_ratio_vs_direct_c64",
        80,
    ),
    Benchmark(
        "tasks",
        "what tasks cost beside their components",
        "record_replay_us overhead_ms_per_hop bytes_per_s_shm static_vs_dynamic_throughput",
        40,
    ),
    Benchmark(
        "speech",
        "spoken questions answered aloud, in parts against one process",
        "wer throughput_vs_monolith p99_vs_monolith",
        120,
        "components",
    ),
)
BY_NAME = {one.name: one for one in BENCHMARKS}
