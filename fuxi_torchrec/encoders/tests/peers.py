"""The nine comparison encoders as plainly as they can be written: one user, every formula as it is defined.

Each function takes the released parameters by their names, one user's rows (n, d), times (n,) and the time of the
request, and gives the outputs after every block and the final rows. Nothing is shared with the encoders themselves.

Letters: n events, d width, H heads, f head width, N positions, e inner width, s state width, K mini-batch.
"""

import math

import torch
import torch.nn.functional as F

POSITIONS = "_input_features_preproc._pos_emb.weight"


def layers_of(params, prefix):
    """The parameters of each layer, by their names in it."""
    numbers = sorted({int(name.removeprefix(prefix).split(".")[0]) for name in params if name.startswith(prefix)})
    return [
        {n.removeprefix(f"{prefix}{k}."): p for n, p in params.items() if n.startswith(f"{prefix}{k}.")}
        for k in numbers
    ]


def rows_of(params, x):
    """What enters the first block: sqrt(d)·e_i + P[min(i−1, N−1)]."""
    table = params[POSITIONS]
    return math.sqrt(x.shape[1]) * x + table[torch.arange(len(x)).clamp(max=len(table) - 1)]


def layer_norm(x, eps, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms(x, weight=None, eps=1e-6):
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def heads_of(x, heads):
    """(n, H·f) to (H, n, f)."""
    return x.reshape(len(x), heads, -1).transpose(0, 1)


def joined(x):
    """(H, n, f) to (n, H·f)."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def next_times(times, request):
    """t_{i+1} of every event."""
    return torch.cat((times[1:], request.reshape(1)))


def bucket_thresholds():
    """T_k = ceil(exp(0.301·k)), k = 1..128, exactly."""
    from decimal import ROUND_CEILING, Decimal, getcontext

    getcontext().prec = 60
    return torch.tensor([int((Decimal("0.301") * k).exp().to_integral_value(ROUND_CEILING)) for k in range(1, 129)])


def position_map(weights, n, positions):
    """pos(i−j) where j ≤ i, else 0."""
    distance = torch.arange(n)[:, None] - torch.arange(n)
    return weights[positions - 1 - distance.clamp(0, positions - 1)] * causal(n)


def bucket_map(weights, times, request):
    """ts[b(t_{i+1} − t_j)] where j ≤ i, else 0."""
    gaps = (next_times(times, request)[:, None] - times).abs()
    return weights[torch.searchsorted(bucket_thresholds(), gaps, right=True)] * causal(len(times))


def hstu(params, heads, x, times, request):
    positions, n, outs = len(params[POSITIONS]), len(x), []
    y = rows_of(params, x)
    for p in layers_of(params, "_hstu._attention_layers."):
        value = p["_o.weight"].shape[1]
        query = p["_uvqk"].shape[1] // 2 - value
        u, v, q, k = F.silu(layer_norm(y, 1e-6) @ p["_uvqk"]).split([value, value, query, query], 1)
        bias = position_map(p["_rel_attn_bias._pos_w"], n, positions)
        bias = bias + bucket_map(p["_rel_attn_bias._ts_w"], times, request)
        scores = heads_of(q, heads) @ heads_of(k, heads).mT + bias
        mixed = joined((F.silu(scores) * causal(n) / positions) @ heads_of(v, heads))
        y = (u * layer_norm(mixed, 1e-6)) @ p["_o.weight"].T + p["_o.bias"] + y
        outs.append(y)
    return outs, y


def mffn(p, o, x):
    z = o @ p["_mffn.lin0.weight"].T + p["_mffn.lin0.bias"] + x
    m = rms(z)
    return (F.silu(m @ p["_mffn.lin1.weight"].T) * (m @ p["_mffn.lin3.weight"].T)) @ p["_mffn.lin2.weight"].T + z


def head_by_head(heads, *parts):
    """Columns of head 0 of every part, then of head 1, ..."""
    return joined(torch.cat([heads_of(part, heads) for part in parts], 2))


def fuxi_alpha(params, heads, x, times, request):
    positions, n, outs = len(params[POSITIONS]), len(x), []
    y = rows_of(params, x)
    for p in layers_of(params, "_fuxi._attention_layers."):
        value = p["_mffn.lin0.weight"].shape[1] // 3
        query = (p["_uvqk"].shape[1] - 4 * value) // 2
        u, v, q, k = F.silu(rms(y) @ p["_uvqk"]).split([3 * value, value, query, query], 1)
        scores = F.silu(heads_of(q, heads) @ heads_of(k, heads).mT) * causal(n) / positions
        by_content = joined(scores @ heads_of(v, heads))
        by_position = position_map(p["_rel_attn_bias._pos_w"], n, positions) @ v
        by_time = bucket_map(p["_rel_attn_bias._ts_w"], times, request) @ v
        y = mffn(p, u * rms(head_by_head(heads, by_position, by_time, by_content)), y)
        outs.append(y)
    return outs, y


def fuxi_beta(params, heads, x, times, request):
    positions, n, outs = len(params[POSITIONS]), len(x), []
    y = rows_of(params, x)
    gaps = (next_times(times, request)[:, None] - times).clamp(min=0).to(x.dtype)
    for p in layers_of(params, "_fuxi._attention_layers."):
        value = p["_mffn.lin0.weight"].shape[1] // 2
        u, v = F.silu(rms(y) @ p["_uvqk"]).split([2 * value, value], 1)
        if "_rel_attn_bias._exp_a" in p:
            decayed = p["_rel_attn_bias._exp_a"] * torch.exp(-torch.exp(p["_rel_attn_bias._exp_b"]) * gaps)
        else:
            decayed = p["_rel_attn_bias._pow_a"] * (1 + gaps) ** -p["_rel_attn_bias._pow_b"]
        by_position = position_map(p["_rel_attn_bias._pos_w"], n, positions) @ v
        by_time = (decayed * causal(n)) @ v
        y = mffn(p, u * rms(head_by_head(heads, by_position, by_time)), y)
        outs.append(y)
    return outs, y


def sasrec(params, heads, x, times, request):
    n, outs = len(x), []
    y = rows_of(params, x)
    forward = layers_of(params, "forward_layers.")
    for p, after in zip(layers_of(params, "attention_layers."), forward, strict=True):
        h = layer_norm(y, 1e-8)
        w_q, w_k, w_v = p["in_proj_weight"].chunk(3)
        b_q, b_k, b_v = p["in_proj_bias"].chunk(3)
        q, k, v = (heads_of(part, heads) for part in (h @ w_q.T + b_q, y @ w_k.T + b_k, y @ w_v.T + b_v))
        scores = (q @ k.mT / math.sqrt(q.shape[2])).masked_fill(~causal(n), -math.inf)
        mixed = joined(scores.softmax(-1) @ v) @ p["out_proj.weight"].T + p["out_proj.bias"]
        y = layer_norm(h + mixed, 1e-8)
        inner = F.relu(y @ after["_conv1d.0.weight"][:, :, 0].T + after["_conv1d.0.bias"])
        y = y + inner @ after["_conv1d.3.weight"][:, :, 0].T + after["_conv1d.3.bias"]
        outs.append(y)
    return outs, y


def rotated(x, angles):
    """Pairs (2m, 2m+1) of the last dimension turned by angles (n, f/2)."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def retnet(params, heads, x, times, request):
    n, outs = len(x), []
    y = rows_of(params, x)
    width = x.shape[1] // heads
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=x.dtype) / (width // 2 - 1))
    angles = torch.arange(n, dtype=x.dtype)[:, None] * frequencies
    decay = 1 - 2.0 ** (-5 - torch.arange(heads, dtype=x.dtype))
    powers = decay[:, None, None] ** (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0) * causal(n)
    for p in layers_of(params, "_retnet.layers."):
        h = rms(y, p["retention_layer_norm.weight"])
        q, k, v, g = (h @ p[f"retention.{name}_proj.weight"].T for name in "qkvg")
        q, k = (rotated(heads_of(part, heads), angles) for part in (q, k / math.sqrt(width)))
        mixed = ((q @ k.mT) * powers) @ heads_of(v, heads) / powers.sum(-1, keepdim=True).sqrt()
        z = y + (F.silu(g) * joined(rms(mixed))) @ p["retention.out_proj.weight"].T
        m = rms(z, p["final_layer_norm.weight"])
        inner = F.gelu(m @ p["ffn.fc1.weight"].T) * (m @ p["ffn.gate.weight"].T)
        y = z + inner @ p["ffn.fc2.weight"].T
        outs.append(y)
    return outs, rms(y, params["_retnet.layer_norm.weight"])


def conv4(x, weight, bias):
    """Depthwise over the events before: w[c,0,3] meets the current one. x is (n, c)."""
    padded = torch.cat((x.new_zeros(3, x.shape[1]), x))
    return sum(weight[:, 0, k] * padded[k : k + len(x)] for k in range(4)) + bias


def linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def post_norm_ffn(p, a, names, activation, norm):
    inner = linear(p, f"ffn.{names[1]}", activation(linear(p, f"ffn.{names[0]}", a)))
    return layer_norm(inner + a, 1e-12, p[f"ffn.{norm}.weight"], p[f"ffn.{norm}.bias"])


def mamba4rec(params, heads, x, times, request):
    outs = []
    y = rows_of(params, x)
    layers = layers_of(params, "mamba_layers.")
    for p in layers:
        u, z = (y @ p["mamba.in_proj.weight"].T).chunk(2, 1)
        u = F.silu(conv4(u, p["mamba.conv1d.weight"], p["mamba.conv1d.bias"]))
        rank, states = p["mamba.dt_proj.weight"].shape[1], p["mamba.A_log"].shape[1]
        step, b, c = (u @ p["mamba.x_proj.weight"].T).split([rank, states, states], 1)
        step = F.softplus(linear(p, "mamba.dt_proj", step))
        a, h, mixed = -p["mamba.A_log"].exp(), torch.zeros_like(p["mamba.A_log"]), []
        for i in range(len(y)):
            h = torch.exp(step[i, :, None] * a) * h + step[i, :, None] * b[i] * u[i, :, None]
            mixed.append(h @ c[i] + p["mamba.D"] * u[i])
        out = (torch.stack(mixed) * F.silu(z)) @ p["mamba.out_proj.weight"].T
        out = out + y if len(layers) > 1 else out
        y = post_norm_ffn(
            p, layer_norm(out, 1e-12, p["LayerNorm.weight"], p["LayerNorm.bias"]), ("w_1", "w_2"), F.gelu, "LayerNorm"
        )
        outs.append(y)
    return outs, y


def recblr(params, heads, x, times, request, padded=0):
    outs = []
    y = rows_of(params, x)
    for p in layers_of(params, "recurrent_layers."):
        name = "behavior_modeling"
        u, z = (y @ p[f"{name}.input.weight"].T).chunk(2, 1)
        u = torch.cat((u.new_zeros(padded, u.shape[1]), u))
        u = F.silu(conv4(u, p[f"{name}.conv1d.weight"], p[f"{name}.conv1d.bias"]))
        r, g = linear(p, f"{name}.gates", u).chunk(2, 1)
        alpha = torch.exp(-F.softplus(p[f"{name}.Lambda"]) * r.sigmoid())
        beta = torch.sqrt(1 - alpha**2 + 1e-8) * g.sigmoid()
        h, states = torch.zeros_like(u[0]), []
        for i in range(len(u)):
            h = alpha[i] * h + beta[i] * u[i]
            states.append(h)
        mixed = (F.silu(z) * torch.stack(states)[padded:]) @ p[f"{name}.output.weight"].T
        a = layer_norm(mixed + y, 1e-12, p["layer_norm.weight"], p["layer_norm.bias"])
        y = post_norm_ffn(p, a, ("w_1", "w_2"), F.silu, "layer_norm")
        outs.append(y)
    return outs, y


def tim4rec(params, heads, x, times, request, conv_activation=F.silu):
    n, outs = len(x), []
    y = rows_of(params, x)
    slots = len(params["layer_norm_time.weight"])
    filled = torch.zeros(slots, dtype=torch.int64)
    filled[:n], filled[n] = times, request
    gaps = torch.cat((filled.new_zeros(1), filled.diff())).to(x.dtype)
    layers = layers_of(params, "ssd_layers.")
    count = len(layers[0]["ssd.A_log"])  # heads
    clock = layer_norm(gaps, 1e-10, params["layer_norm_time.weight"], params["layer_norm_time.bias"]).expand(count, -1)
    for p in layers:
        e = p["ssd.out_proj.weight"].shape[1]
        s = (p["ssd.in_proj.weight"].shape[0] - 2 * e - count) // 2
        z, xbc, step = linear(p, "ssd.in_proj", y).split([e, e + 2 * s, count], 1)
        xbc = conv_activation(conv4(xbc, p["ssd.conv1d.weight"], p["ssd.conv1d.bias"]))
        u, b, c = xbc.split([e, s, s], 1)
        scale = linear(p, "ssd.mlp4time_scale.3", F.silu(linear(p, "ssd.mlp4time_scale.1", clock)))
        seen = (clock * scale).T
        for name in ("conv1d4time_1", "conv1d4time_2"):
            seen = conv_activation(conv4(seen, p[f"ssd.{name}.weight"], p[f"ssd.{name}.bias"]))
        seen = seen.T
        step = F.softplus(step * seen[:, :n].T + p["ssd.dt_bias"])
        a, u_h = -p["ssd.A_log"].exp(), u.reshape(n, count, -1)
        state, mixed = u.new_zeros(count, u_h.shape[2], s), []
        for i in range(n):
            state = torch.exp(step[i] * a)[:, None, None] * state + (step[i, :, None] * u_h[i])[:, :, None] * b[i]
            mixed.append(state @ c[i] + p["ssd.D"][:, None] * u_h[i])
        mixed = rms(torch.stack(mixed).reshape(n, e) * F.silu(z), p["ssd.norm.weight"], 1e-10)
        out = linear(p, "ssd.out_proj", mixed)
        out = out + y if len(layers) > 1 else out
        out = layer_norm(out, 1e-10, p["layer_norm.weight"], p["layer_norm.bias"])
        y = post_norm_ffn(p, out, ("fc1", "fc2"), F.hardswish, "layer_norm")
        gate = linear(p, "ssd.time_gate_residual.1", clock).sigmoid()
        clock = gate * clock + (1 - gate) * seen
        clock = layer_norm(clock, 1e-10, p["ssd.time_layer_norm.weight"], p["ssd.time_layer_norm.bias"])
        outs.append(y)
    return outs, y


def gelu_tanh_slope(x):
    th = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return 0.5 * x * (1 - th * th) * (0.79788456 + 0.1070322243 * x * x) + 0.5 * (1 + th)


def ttt4rec(params, heads, x, times, request):
    n, outs = len(x), []
    y = rows_of(params, x)
    width = x.shape[1] // heads
    for p in layers_of(params, "_ttt_layers.layers."):
        own = {k.removeprefix("seq_modeling_block."): v for k, v in p.items()}
        size = len(own["learnable_token_idx"])
        h = rms(y, p["seq_norm.weight"])
        place = torch.arange(n) % size
        frequencies = 10000.0 ** (-2 * torch.arange(width // 2, dtype=x.dtype) / width)
        angles = place[:, None].to(x.dtype) * frequencies
        q, k, v = (heads_of(h @ own[f"{name}_proj.weight"].T, heads) for name in "qkv")
        q, k = rotated(q, angles), rotated(k, angles)
        rate = torch.sigmoid(
            torch.einsum("nd,hd->hn", h, own["learnable_ttt_lr_weight"][:, 0]) + own["learnable_ttt_lr_bias"]
        )
        rate = rate / width
        token = (1 / (torch.arange(size, dtype=x.dtype) + 1) + own["learnable_token_idx"]).clamp(min=0)
        mixed = joined(torch.stack([_inner(own, a, q[a], k[a], v[a], rate[a], token, size) for a in range(heads)]))
        z = y + layer_norm(mixed, 1e-6, own["post_norm.weight"], own["post_norm.bias"]) @ own["o_proj.weight"].T
        m = rms(z, p["ffn_norm.weight"])
        inner = F.silu(m @ p["mlp.gate_proj.weight"].T) * (m @ p["mlp.up_proj.weight"].T)
        y = z + inner @ p["mlp.down_proj.weight"].T
        outs.append(y)
    return outs, rms(y, params["_ttt_layers.norm.weight"])


def _inner(p, head, q, k, v, rate, token, size):
    """The inner network of one head: gradient steps at the mini-batch's starting weights, event by event."""
    deep = "W2" in p
    w1, b1 = p["W1"][head], p["b1"][head, 0]
    w2, b2 = (p["W2"][head], p["b2"][head, 0]) if deep else (None, None)
    scale, shift = p["ttt_norm_weight"][head], p["ttt_norm_bias"][head]
    outputs = []
    for begin in range(0, len(q), size):
        sums = [torch.zeros_like(each) for each in ((w1, b1, w2, b2) if deep else (w1, b1))]
        for place in range(min(size, len(q) - begin)):
            i = begin + place
            z1 = k[i] @ w1 + b1
            x2 = F.gelu(z1, approximate="tanh") if deep else None
            last = x2 @ w2 + b2 if deep else z1
            std = torch.sqrt(last.var(unbiased=False) + 1e-6)
            unit = (last - last.mean()) / std
            error = (scale * unit + shift - (v[i] - k[i])) * scale
            slope = (error - error.mean() - unit * (error * unit).mean()) / std
            first = (slope @ w2.T) * gelu_tanh_slope(z1) if deep else slope
            news = [torch.outer(k[i], first), first, *((torch.outer(x2, slope), slope) if deep else ())]
            sums = [total + rate[i] * new for total, new in zip(sums, news, strict=True)]
            now = [start - token[place] * total for start, total in zip((w1, b1, w2, b2), sums, strict=False)]
            out = q[i] @ now[0] + now[1]
            if deep:
                out = F.gelu(out, approximate="tanh") @ now[2] + now[3]
            outputs.append(q[i] + layer_norm(out, 1e-6, scale, shift))
        if place == size - 1:
            if deep:
                w1, b1, w2, b2 = now
            else:
                w1, b1 = now
    return torch.stack(outputs)


PEERS = {
    each.__name__: each for each in (sasrec, hstu, fuxi_alpha, fuxi_beta, retnet, mamba4rec, tim4rec, recblr, ttt4rec)
}
