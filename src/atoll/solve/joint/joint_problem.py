"""The joint choice of models, GPU tiers, parallelism and routing, as arrays; and an answer to it.

Query types i < I, models j < J, tiers k < K (a GPU with a precision), configurations c < C (tensor
parallel n, pipeline depth m). The numbers in brackets are those of the paper's constraints.

    minimise  T sum p_k y_jk                       (i)   rent; y_jk = n m of the configuration of (j, k)
            + T sum s B_j z_ijk                    (ii)  weights in storage
            + T sum s theta_i r_i lambda_i x_ijk   (iii) data in storage
            + sum rho_i D_i                        (iv)  delay, D_i = sum D_ijkc x_ijk of the configuration c
            + sum phi_i u_i                        (v)   what is not served
    (5b) sum_jk x_ijk + u_i = 1          (5c) rent and storage within the budget
    (5d, 5e) one configuration for each active (j, k)
    (5f) weights and KV cache of a GPU's shard within its memory
    (5g) sum_i alpha_ijk r_i lambda_i / 1000 x_ijk <= eta 3600 P_k y_jk
    (5h) all storage together within its capacity (the paper's text; its formula could be read per type)
    (5i) D_i <= Delta_i      (5j) sum e_ijk x_ijk <= eps_i      (5k) 0 <= x_ijk <= z_ijk <= q_jk
    (stock) sum_jk y_jk of the tiers of a lot within its stock, where there are lots: the paper has none

Units: hours, queries/h, tokens, GB, TFLOP/s, GFLOP/token, seconds, USD for the whole horizon. `rho` is USD
per second of a type's mean delay and `phi` USD for all of a type unserved: as (5a) has them, not multiplied
by arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

HOUR_S = 3600.0


@dataclass(frozen=True)
class JointProblem:
    """One instance; shapes are in the names of indices: `delay[i, j, k, c]` seconds, and so on."""

    horizon_h: float
    budget: float
    storage_gb: float
    storage_usd: float
    """USD per GB and hour."""
    efficiency: float
    """eta: the share of peak FLOP/s that is reached."""
    rate: Floats
    """lambda[i], queries/h."""
    tokens: Floats
    """r[i] = h[i] + f[i], prompt and answer."""
    data_gb: Floats
    """theta[i], GB per token."""
    delay_usd: Floats
    """rho[i], USD per second."""
    unmet_usd: Floats
    """phi[i], USD."""
    max_unmet: Floats
    """zeta[i], the largest share of a type that may stay unserved."""
    delay_limit: Floats
    """Delta[i], seconds."""
    error_limit: Floats
    """eps[i], a share."""
    weights_gb: Floats
    """B[j]."""
    kv_gb: Floats
    """beta[j], GB per token."""
    memory_gb: Floats
    """C[k], of one GPU."""
    tflops: Floats
    """P[k], of one GPU."""
    gpu_usd: Floats
    """p[k], USD per hour."""
    tp: Ints
    """n[c]."""
    pp: Ints
    """m[c]."""
    allowed: Bools
    """allowed[k, c]: whether a tier can be split so."""
    delay: Floats
    """D[i, j, k, c], seconds: comp[i, j, k] r[i] / n + m comm[i, j, k] f[i]."""
    error: Floats
    """e[i, j, k]."""
    compute: Floats
    """alpha[i, j, k], GFLOP per token."""
    residence_s: Floats
    """T_res[i, j, k]."""
    lot: Ints | None = None
    """lot[k], the lot that a tier's GPUs are of; None where there are as many as anybody likes."""
    stock: Ints | None = None
    """stock[l], GPUs of a lot."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(I, J, K, C)."""
        i, j, k, c = self.delay.shape
        return int(i), int(j), int(k), int(c)

    @property
    def gpus(self) -> Ints:
        """GPUs of a configuration, n m."""
        return np.asarray(self.tp * self.pp)

    @property
    def data_stored_gb(self) -> Floats:
        """theta[i] r[i] lambda[i]: GB that serving all of a type stores."""
        return np.asarray(self.data_gb * self.tokens * self.rate)

    @property
    def load_tflop(self) -> Floats:
        """TFLOP per hour that all of type i asks of (j, k)."""
        return np.asarray(self.compute * (self.tokens * self.rate / 1e3)[:, None, None])

    @property
    def capacity_tflop(self) -> Floats:
        """TFLOP per hour that one GPU of a tier gives."""
        return np.asarray(self.efficiency * HOUR_S * self.tflops)

    @property
    def kv_load_gb(self) -> Floats:
        """beta[j] r[i] T_res[i, j, k]: GB of KV cache that all of type i holds at (j, k), over all GPUs."""
        return np.asarray(self.kv_gb[None, :, None] * self.tokens[:, None, None] * self.residence_s)


@dataclass(frozen=True)
class JointAnswer:
    """`config[j, k]` is a configuration or -1; `routed` x[i, j, k], `placed` z[i, j, k], `unmet` u[i].

    `bound` is a proven lower bound on the cost, -inf where there is none.
    """

    config: Ints
    routed: Floats
    placed: Bools
    unmet: Floats
    bound: float = -np.inf


@dataclass(frozen=True)
class JointCost:
    """The five terms of (5a), USD over the horizon."""

    rent: float
    weights: float
    data: float
    delay: float
    unmet: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.rent + self.weights + self.data + self.delay + self.unmet

    @property
    def paid(self) -> float:
        """Cost that counts against the budget (5c)."""
        return self.rent + self.weights + self.data


def cost_of(problem: JointProblem, answer: JointAnswer) -> JointCost:
    """Return what an answer costs, term by term, whether or not it is feasible."""
    active = answer.config >= 0
    gpus = np.where(active, problem.gpus[np.maximum(answer.config, 0)], 0)
    stored = answer.placed.sum(axis=(0, 2)) @ problem.weights_gb
    data = problem.data_stored_gb @ answer.routed.sum(axis=(1, 2))
    chosen = np.take_along_axis(
        problem.delay, np.maximum(answer.config, 0)[None, :, :, None], axis=3
    )[..., 0]
    delay = (np.where(active[None], chosen, 0.0) * answer.routed).sum(axis=(1, 2))
    hours, price = problem.horizon_h, problem.storage_usd
    return JointCost(
        rent=hours * float(gpus.sum(axis=0) @ problem.gpu_usd),
        weights=hours * price * float(stored),
        data=hours * price * float(data),
        delay=float(problem.delay_usd @ delay),
        unmet=float(problem.unmet_usd @ answer.unmet),
    )
