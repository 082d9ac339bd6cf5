#!/usr/bin/env python3
"""The training steps of the benchmark `steps` in PyTorch, for the rows of peers.

    python3 benches/pytorch.py --cases mlp:64:sgd,gpt:8:adam > pytorch.jsonl
    cargo bench --features cuda --bench steps -- --device cuda --peers pytorch.jsonl --markdown table.md

Prints one JSON object a line, for each case and mode:

- `eager`: the step as PyTorch runs it.
- `graph`: forward, backward and optimizer captured into one CUDA graph; a call copies the batch into its inputs and
  replays. The loss stays in the graph's buffer, where ours copies it out.
- `compile`: model and loss through `torch.compile(mode="reduce-overhead")`, which records CUDA graphs of forward and
  backward; the optimizer is the fused one, outside.

`sync_ms` is a step and a wait for the device, `async_ms` many steps and one wait, per step; medians, with the least
beside them. `busy_ms` is the time in which any kernel or copy ran, from the profiler, and `kernels` counts the kernels,
both per step. They are taken last, since a profiler slows what it watches.

The nets are those of `src/models.rs`, with PyTorch's own initialisation, attention by `scaled_dot_product_attention` and
the LSTM by cuDNN: what a user of PyTorch would write, not a copy of our operations. Each case and mode runs in a process
of its own, so that one that fails leaves the others alone; its row then has `error` in place of times.
"""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

CASES = "mlp:64:sgd,mlp:64:adam,resnet18:16:sgd,resnet18:16:adam,gpt:8:adam,lstm:32:adam,control:4096:sgd"
MODES = "eager,graph,compile"
LR = 1e-3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES, help="NAME:BATCH or NAME:BATCH:OPTIMIZER, with commas between")
    parser.add_argument("--modes", default=MODES, help="of eager, graph and compile, with commas between")
    parser.add_argument("--matmul-precision", choices=["high", "highest"], default="high", help="high is TF32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=15, help="calls of each kind in a round")
    parser.add_argument("--warmup", type=int, default=15, help="steps before anything is timed")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one case and mode")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def split(case):
    parts = case.strip().split(":")
    if len(parts) == 2:
        parts.append("sgd")
    if len(parts) != 3 or not parts[1].isdigit() or parts[2] not in ("sgd", "adam"):
        sys.exit(f"{case}: expected NAME:BATCH or NAME:BATCH:OPTIMIZER")
    return parts[0], int(parts[1]), parts[2]


def nets(torch):
    nn, F = torch.nn, torch.nn.functional

    class Mlp(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                x = layer(F.relu(x) if index else x)
            return x

    class ConvNorm(nn.Module):
        def __init__(self, before, after, kernel, stride):
            super().__init__()
            self.conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
            self.norm = nn.BatchNorm2d(after)

        def forward(self, x):
            return self.norm(self.conv(x))

    class ResidualBlock(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.first = ConvNorm(before, after, 3, stride)
            self.second = ConvNorm(after, after, 3, 1)
            changes = stride != 1 or before != after
            self.shortcut = ConvNorm(before, after, 1, stride) if changes else nn.Identity()

        def forward(self, x):
            return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))

    class ResNet18(nn.Module):
        def __init__(self, width=64, classes=10):
            super().__init__()
            self.stem = ConvNorm(3, width, 3, 1)
            blocks, before = [], width
            for after, stride in [(width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)]:
                blocks += [ResidualBlock(before, after, stride), ResidualBlock(after, after, 1)]
                before = after
            self.blocks = nn.Sequential(*blocks)
            self.head = nn.Linear(before, classes)

        def forward(self, x):
            x = self.blocks(F.relu(self.stem(x)))
            return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    class Block(nn.Module):
        def __init__(self, width, heads, dropout):
            super().__init__()
            self.heads, self.dropout = heads, dropout
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv = nn.Linear(width, 3 * width)
            self.project = nn.Linear(width, width)
            self.widen = nn.Linear(width, 4 * width)
            self.narrow = nn.Linear(4 * width, width)
            self.drop = nn.Dropout(dropout)

        def forward(self, x):
            batch, window, width = x.shape
            qkv = self.qkv(self.norms[0](x))
            q, k, v = (
                part.view(batch, window, self.heads, width // self.heads).transpose(1, 2)
                for part in qkv.split(width, dim=2)
            )
            rate = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(batch, window, width)
            x = x + self.drop(self.project(mixed))
            return x + self.drop(self.narrow(F.gelu(self.widen(self.norms[1](x)))))

    class Gpt(nn.Module):
        def __init__(self, vocabulary=512, window=128, width=256, heads=8, layers=6, dropout=0.1):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Parameter(0.1 * torch.randn(window, width))
            self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary)
            nn.init.normal_(self.tokens.weight, std=0.1)

        def forward(self, tokens):
            x = self.blocks(self.tokens(tokens) + self.positions)
            return self.head(self.norm(x)).flatten(0, 1)

    class Lstm(nn.Module):
        def __init__(self, features=64, hidden=128, layers=2, classes=10):
            super().__init__()
            self.lstm = nn.LSTM(features, hidden, layers, batch_first=True)
            self.head = nn.Linear(hidden, classes)

        def forward(self, x):
            x, _ = self.lstm(x)
            return self.head(x[:, -1])

    class WithLoss(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x, y):
            return F.cross_entropy(self.net(x), y)

    return Mlp, ResNet18, Gpt, Lstm, WithLoss


def busy(torch, step, steps=10):
    """Milliseconds per step in which any kernel or copy ran, and kernels per step."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    finally:
        os.remove(path)
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    on_device = [event for event in events if event.get("cat") in kinds and "dur" in event]
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in on_device)
    # Branches of a graph run side by side: time that two kernels share counts once.
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    kernels = sum(event["cat"] == "kernel" for event in on_device)
    if kernels == 0:
        raise RuntimeError("the profiler saw no kernel")
    return total / 1e3 / steps, kernels / steps


def measure(args):
    import torch

    (case,), (mode,) = args.cases.split(","), args.modes.split(",")
    name, size, optimizer = split(case)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.backends.cudnn.allow_tf32 = args.matmul_precision == "high"
    # As Burn does, try the convolution kernels there are and take the fastest.
    torch.backends.cudnn.benchmark = True

    Mlp, ResNet18, Gpt, Lstm, WithLoss = nets(torch)

    def labels(count, classes=10):
        return torch.randint(0, classes, (count,), device=device)

    def noise(*shape):
        return torch.randn(*shape, device=device), labels(size)

    if name == "mlp":
        net, sample = Mlp([784, 256, 256, 256, 10]), lambda: noise(size, 784)
    elif name == "control":
        net, sample = Mlp([8192, 8192, 8192, 10]), lambda: noise(size, 8192)
    elif name == "resnet18":
        net, sample = ResNet18(), lambda: noise(size, 3, 32, 32)
    elif name == "gpt":
        net = Gpt()
        sample = lambda: (torch.randint(0, 512, (size, 128), device=device), labels(size * 128, 512))
    elif name == "lstm":
        net, sample = Lstm(), lambda: noise(size, 32, 64)
    else:
        sys.exit(f"no net {name}: mlp, resnet18, gpt, lstm, control")
    model = WithLoss(net).to(device).train()
    if optimizer == "sgd":
        optim = torch.optim.SGD(model.parameters(), lr=LR)
    else:
        optim = torch.optim.Adam(model.parameters(), lr=LR, fused=True, capturable=True)
    batches = [sample() for _ in range(8)]
    forward = model
    if mode == "compile":
        forward = torch.compile(model, mode="reduce-overhead")

    def train(x, y):
        optim.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()
        optim.step()
        return loss

    calls = 0

    def step():
        nonlocal calls
        x, y = batches[calls % len(batches)]
        calls += 1
        if mode == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        train(x, y)

    if mode == "graph":
        static_x, static_y = (tensor.clone() for tensor in batches[0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(args.warmup):
                train(static_x, static_y)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        optim.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static_loss = train(static_x, static_y)

        def step():
            nonlocal calls
            x, y = batches[calls % len(batches)]
            calls += 1
            static_x.copy_(x)
            static_y.copy_(y)
            graph.replay()

    for _ in range(args.warmup):
        step()
    torch.cuda.synchronize()
    if mode == "graph" and not torch.isfinite(static_loss).item():
        raise RuntimeError("the loss of the replay is not finite")

    sync, queued = [], []
    for _ in range(args.rounds):
        for _ in range(args.calls):
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            sync.append((time.perf_counter() - started) * 1e3)
        started = time.perf_counter()
        for _ in range(args.calls):
            step()
        torch.cuda.synchronize()
        queued.append((time.perf_counter() - started) * 1e3 / args.calls)

    row = {
        "peer": f"pytorch {torch.__version__}",
        "mode": mode,
        "case": name,
        "batch": size,
        "optimizer": optimizer,
        "sync_ms": statistics.median(sync),
        "sync_min_ms": min(sync),
        "async_ms": statistics.median(queued),
        "async_min_ms": min(queued),
        "busy_ms": None,
        "kernels": None,
        "samples": len(sync),
        "samples_async": len(queued),
        "matmul_precision": args.matmul_precision,
        "card": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
    }
    # Printed before the profiler runs too: the last row that a process printed is kept, so its times survive.
    print(json.dumps(row), flush=True)
    try:
        row["busy_ms"], row["kernels"] = busy(torch, step)
        print(json.dumps(row), flush=True)
    except Exception as error:
        print(f"{case} {mode}: no busy time: {error}", file=sys.stderr, flush=True)


def last_row(output):
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


def output_of(command, timeout):
    """What a command printed, and how it ended.

    Files in place of pipes, and a session of its own: the compiler's workers hold on to what they inherit, and would be
    waited for.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        try:
            how = f"ended with {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            how = f"took more than {timeout} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
        return printed[0], printed[1], how


def version():
    """PyTorch's, without importing it: that may be what failed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "?"


def run_one(args, case, mode):
    """The row of a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--one", "--cases", case, "--modes", mode]
    for option in ("matmul-precision", "rounds", "calls", "warmup"):
        command += [f"--{option}", str(getattr(args, option.replace("-", "_")))]
    out, err, how = output_of(command, args.timeout)
    row = last_row(out)
    if row is None:
        name, size, optimizer = split(case)
        # The exception, whose message may go on for lines.
        lines = err.strip().splitlines()
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        why = f"{how}: {(named or lines)[-1][:300]}" if lines else how
        row = {"peer": f"pytorch {version()}", "mode": mode, "case": name, "batch": size, "optimizer": optimizer, "error": why}
        row["matmul_precision"] = args.matmul_precision
    if row.get("busy_ms") is None:
        print(f"--- {case} {mode}\n{err[-3000:]}", file=sys.stderr, flush=True)
    return row


def main():
    args = arguments()
    if args.one:
        measure(args)
        return
    cases, modes = args.cases.split(","), args.modes.split(",")
    for case in cases:
        split(case)
    for mode in modes:
        if mode not in MODES.split(","):
            sys.exit(f"no mode {mode}: {MODES}")
    # Ended by its time, it ends the process that it waits for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    print(f"float32 matmul precision: {args.matmul_precision}", file=sys.stderr, flush=True)
    for case in cases:
        for mode in modes:
            print(json.dumps(run_one(args, case, mode)), flush=True)


if __name__ == "__main__":
    main()
