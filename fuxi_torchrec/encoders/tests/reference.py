"""The model restated from its formulae in float64, one event at a time over all earlier ones. Slow, and on its own.

Nothing of the package is used but the names of the parameters. Both presets; the official one is checked against the
released code's tensors, which is what makes the paper one worth comparing with.
"""

import itertools
import math
from pathlib import Path

import torch

GOLDENS = Path(__file__).parent / "goldens"
EPS = 1e-6


def rms(x):
    return x / torch.sqrt((x * x).mean() + EPS)


def layer(x):
    centred = x - x.mean()
    return centred / torch.sqrt((centred * centred).mean() + EPS)


def silu(x):
    return x / (1 + torch.exp(-x))


def user_output(p, config, events, times, request):
    """Outputs (n, d) of one user: rows e_i, times t_i, and the request time t_{n+1}."""
    n, d = events.shape
    official = config.preset == "official"
    norm = layer if official else rms
    t = [*times.tolist(), int(request)]
    c = [0]
    for a, b in itertools.pairwise(t):
        c.append(c[-1] + max(0, b - a))
    last_row = config.max_positions - 1
    x = [math.sqrt(d) * events[i] + p["positions"][min(i, last_row)] for i in range(n)]
    for number in range(config.num_layers):
        x = block(p, f"blocks.{number}.", config, norm, x, t, c)
    return torch.stack(x)


def block(p, at, config, norm, x, t, c):
    n, d = len(x), config.dim
    official = config.preset == "official"
    W = p[at + "in_proj"]
    rows = [norm(row) @ W for row in x]
    u = [silu(r[: 3 * d]) if official else r[: 3 * d] for r in rows]
    q, k, v = ([silu(r[(3 + s) * d : (4 + s) * d]) for r in rows] for s in range(3))
    v_t, v_p = ([r[(6 + s) * d : (7 + s) * d] for r in rows] for s in range(2))

    y_ret = retention(p[at + "retention.decay"], config.num_heads, q, k, v, 1 if official else 0)
    if not official:
        y_ret = [norm(y) for y in y_ret]
    decay = p[at + "temporal.decay"] if not official else p["blocks.0.temporal.decay"]
    y_t = temporal(decay, p[at + "temporal.alpha"], p[at + "temporal.beta"], config.temporal_periods, v_t, t, c)
    y_p = positional(p[at + "positional.kernel"], p[at + "positional.alpha"], p[at + "positional.beta"], v_p)

    out = []
    W1, W2 = p[at + "ffn_in"].chunk(2, dim=1)
    for i in range(n):
        o = torch.cat([norm(y_ret[i]), norm(y_t[i]), norm(y_p[i])]) * u[i]
        z = o @ p[at + "out_proj"] + x[i]
        m = rms(z)
        out.append(((m @ W1) * silu(m @ W2)) @ p[at + "ffn_out"] + z)
    return out


def retention(raw, heads, q, k, v, lag):
    width = len(q[0]) // heads
    total, decays = 0.0, []
    for w in raw:
        total = total + torch.log1p(torch.exp(w))
        decays.append(torch.exp(-torch.exp(-total)))
    out = []
    for i in range(len(q)):
        parts = []
        for a in range(heads):
            s = slice(a * width, (a + 1) * width)
            parts.append(sum(decays[a] ** (i - j + lag) * (q[i][s] @ k[j][s]) * v[j][s] for j in range(i + 1)))
        out.append(torch.cat(parts))
    return out


def positional(kernel, alpha, beta, v):
    rows, width = kernel.shape
    out = []
    for i in range(len(v)):
        own = kernel[min(i, rows - 1)]
        total = sum((own @ kernel[min(j, rows - 1)]) * v[j] for j in range(i + 1))
        out.append(alpha * 2 / width * total + beta * v[i])
    return out


def temporal(raw, alpha, beta, periods, v, t, c):
    scales = len(periods)
    width = len(v[0]) // (2 * scales)
    theta = [2 * math.pi / period for period in periods]
    log_r = [theta[s] * -torch.log1p(torch.exp(-raw[s])) for s in range(scales)]

    def phase(s, time):
        return theta[s] * (time % periods[s])

    out = []
    for i in range(len(v)):
        parts = []
        for head in range(2 * scales):
            s, wave = head % scales, math.sin if head < scales else math.cos
            cols = slice(head * width, (head + 1) * width)
            total = sum(
                torch.exp(log_r[s] * (c[i + 1] - c[j])) * wave(phase(s, t[i + 1]) - phase(s, t[j])) * v[j][cols]
                for j in range(i + 1)
            )
            parts.append(alpha[head] * total + beta[head] * v[i][cols])
        out.append(torch.cat(parts))
    return out


def batch_output(encoder, x, offsets, times, requests):
    """Outputs (T, d) of a batch, with an encoder's parameters."""
    p = {name: value.double() for name, value in encoder.state_dict(keep_vars=True).items()}
    bounds = offsets.tolist()
    parts = [
        user_output(p, encoder.config, x[a:b].double(), times[a:b], requests[user])
        for user, (a, b) in enumerate(itertools.pairwise(bounds))
        if b > a
    ]
    return torch.cat(parts)


def main():
    """Write the goldens of the paper preset."""
    from safetensors.torch import load_file, save_file

    from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, geometric_periods

    source = load_file(GOLDENS / "encoder_c32_f64.safetensors")
    lengths = source["in.past_lengths"].tolist()
    config = FuXiLinearConfig(
        dim=32,
        num_layers=2,
        num_heads=4,
        max_positions=100,
        kernel_dim=16,
        temporal_periods=geometric_periods(16, 8, 8),
    )
    torch.manual_seed(20260227)
    encoder = FuXiLinearEncoder(config)
    with torch.no_grad():  # away from the start, so that every term counts
        for name, parameter in encoder.named_parameters():
            parameter += 0.3 * torch.randn_like(parameter) * (1.0 if parameter.dim() < 2 else 0.2)
            parameter.copy_(parameter.bfloat16().float()) if "kernel" in name else None
    x = torch.cat([source["in.past_embeddings"][b, :n] for b, n in enumerate(lengths)]).double().requires_grad_()
    times = torch.cat([source["in.timestamps"][b, :n] for b, n in enumerate(lengths)])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weight = torch.cat([source["in.loss_weight_R"][b, :n] for b, n in enumerate(lengths)]).double()
    start = {f"param.{name}": parameter.detach().clone() for name, parameter in encoder.named_parameters()}
    encoder.double()
    y = batch_output(encoder, x, offsets, times, source["in.target_timestamps"])
    (y * weight).sum().backward()
    gradients = {f"grad.{name}": parameter.grad for name, parameter in encoder.named_parameters()}
    inputs = {"in.x": x.detach().float(), "in.offsets": offsets, "in.timestamps": times, "in.weight": weight.float()}
    inputs["in.request_timestamps"] = source["in.target_timestamps"]
    save_file({**inputs, **start, **gradients, "grad.x": x.grad, "out": y.detach()}, GOLDENS / "paper.safetensors")


if __name__ == "__main__":
    main()
