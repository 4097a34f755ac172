"""A stack of layers is laid out for the first of a kind; it computes what operators do one by one, and refuses layers
that its program does not fit."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch.fx.experimental.proxy_tensor import make_fx

from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena
from yggdrasil.native.operators import drop_stack

pytestmark = pytest.mark.skipif(not is_native(), reason="no C++ compiler on this machine")
HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_DIM, CAPACITY, CONTEXT = 64, 96, 4, 2, 32, 64, 20
ROWS_OF = {"query": HEADS * HEAD_DIM, "key": KEY_HEADS * HEAD_DIM, "value": KEY_HEADS * HEAD_DIM}
LINEARS = {
    **{name: (size, HIDDEN) for name, size in ROWS_OF.items()}, "output": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
}  # fmt: skip
OWN = ["first_norm", "second_norm", "last_norm", *LINEARS, *(f"{name}_bias" for name in LINEARS), "keys", "values"]
FORMATS = {"quantised": [8, 3, 8, 2, 3, 3, 8], "mixed": [-1, -1, -1, 2, -1, -1, 3], "full": [-1] * 7}
WIDTHS = (1, 3, 8, 20)
EPS, THREADS, SHARED = 1e-5, 2, 2  # mask and offsets are shared
# Whether a gate is gelu and norms are of one more than their weight, a window, and a bound of the scores.
STYLES = {"llama": (False, 0, 0.0), "gemma": (True, 9, 30.0)}


def quantised(number, weight):
    form = GGMLQuantizationType(number)
    return QuantisedRows(form, torch.from_numpy(quants.quantize(weight.float().numpy(), form))).pack(Arena()).packed


class Layers:
    """Layers with their own weights and caches, and what is behind rows as a program and by operators one by one."""

    def __init__(self, formats, dtype, style="llama", count=3):
        self.formats, self.dtype = dict(zip(LINEARS, FORMATS[formats], strict=True)), dtype
        self.is_gemma, self.window, self.softcap = STYLES[style]
        self.generator = torch.Generator().manual_seed(5)
        self.layers = [self._layer() for _ in range(count)]
        self.given = {width: self._rows(width) for width in WIDTHS}

    def _random(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _layer(self):
        layer = {name: 1 + self._random(HIDDEN) / 4 for name in ("first_norm", "second_norm", "last_norm")}
        for name, (n, k) in LINEARS.items():
            number = self.formats[name]
            full = PackedLinear(self._random(n, k) / 8, None, 1, Arena()).packed
            layer[name] = full if number < 0 else quantised(number, self._random(n, k) / 8)
            layer[f"{name}_bias"] = self._random(n)
        caches = {name: self._random(KEY_HEADS, CAPACITY, HEAD_DIM) for name in ("keys", "values")}
        return {**layer, **caches}

    def _rows(self, width):
        """Rows, a mask where no row behind it sees the second, and where the step lies."""
        mask = torch.ones(width, width, dtype=torch.bool).tril()
        mask[2:, 1:2] = False
        return self._random(1, width, HIDDEN), mask, torch.tensor([CONTEXT, CONTEXT])

    def program(self):
        """Code over [rows, mask, offsets, *OWN], and its numbers."""
        place = {name: 1 + SHARED + number for number, name in enumerate(OWN)}
        last, gemma = 1 + SHARED + len(OWN), int(self.is_gemma)
        query, key, value, attended, after, gate, up, down, normed = range(last, last + 9)

        def linears(read, gate, norm, residual, *names):
            code = [0, read, gate, gemma, place.get(norm, -1), gemma, residual, len(names)]
            for name in names:
                code += [place[name], place[f"{name}_bias"], LINEARS[name][0], self.formats[name]]
            return code

        code = [
            *linears(0, -1, "first_norm", -1, "query", "key", "value"),
            1, query, key, value, -1, -1, -1, -1, place["keys"], place["values"], -1, 2, 1, self.window, 0, 0, 0,
            *linears(attended, -1, None, 0, "output"),
            *linears(after, -1, "second_norm", -1, "gate", "up"),
            *linears(up, gate, None, -1, "down"),
            2, down, place["last_norm"], gemma, after,
        ]  # fmt: skip
        assert normed == down + 1
        linear = [EPS, 1.0, 0.0]
        return code, [*linear, EPS, HEAD_DIM**-0.5, self.softcap, *linear * 4]

    def by_program(self, width, kept, behind=lambda: None):
        """What the layers ``kept`` give, and all caches behind it; ``behind`` is called when the stack is made."""
        layers = [dict(layer) for layer in self.layers]
        for layer in layers:
            layer.update(keys=layer["keys"].clone(), values=layer["values"].clone())
        tensors, (code, numbers) = [layer[name] for layer in layers for name in OWN], self.program()
        number = torch.ops.yggdrasil.keep_stack(
            tensors, [0] * len(layers), range(len(tensors)), code, [len(code)], numbers, [len(numbers), len(OWN)]
        )
        x, mask, offsets = self.given[width]
        behind()
        try:
            outputs = torch.ops.yggdrasil.run_stack(number, x, [mask, offsets], kept, THREADS)
        finally:
            drop_stack(number)
        return [*outputs, *(layer[name] for layer in layers for name in ("keys", "values"))]

    def by_operators(self, width, kept):
        x, mask, offsets = self.given[width]
        outputs, caches = [], []
        for number, layer in enumerate(self.layers):
            keys, values = layer["keys"].clone(), layer["values"].clone()
            query, key, value = self._linears(layer, x, None, "first_norm", None, "query", "key", "value")
            heads = [rows.view(1, width, -1, HEAD_DIM).transpose(1, 2) for rows in (query, key, value)]
            attended = torch.ops.yggdrasil.tree_attention(
                *heads, keys, values, offsets, mask, HEAD_DIM**-0.5, self.window, self.softcap, None, THREADS
            )
            (after,) = self._linears(layer, attended.reshape(1, width, -1), None, None, x, "output")
            gate, up = self._linears(layer, after, None, "second_norm", None, "gate", "up")
            (down,) = self._linears(layer, up, gate, None, None, "down")
            norm = layer["last_norm"]
            x = torch.ops.yggdrasil.norm_rows(down, norm, self.is_gemma, EPS, after, THREADS)
            outputs += [x] if number in kept else []
            caches += [keys, values]
        return [*outputs, *caches]

    def _linears(self, layer, x, gate, norm, residual, *names):
        around = (gate, self.is_gemma, layer[norm] if norm else None, self.is_gemma, EPS, residual)
        packed, biases, sizes = zip(*((layer[n], layer[f"{n}_bias"], LINEARS[n][0]) for n in names), strict=True)
        formats = [self.formats[name] for name in names]
        if formats[0] < 0:
            return torch.ops.yggdrasil.packed_linears(x, *around, packed, biases, sizes, THREADS)
        return torch.ops.yggdrasil.quantised_linears(x, *around, packed, biases, sizes, formats, THREADS)


def assert_alike(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("formats", FORMATS)
def test_a_program_computes_what_operators_do_one_by_one(formats, style, dtype):
    layers = Layers(formats, dtype, style, count=4)
    for width in WIDTHS:
        assert_alike(layers.by_program(width, [0, 2, 3]), layers.by_operators(width, [0, 2, 3]))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("formats", FORMATS)
def test_a_layer_that_is_of_another_kind_is_laid_out_anew(formats, which):
    """Biases of one layer are float32: the others' are made so."""
    layers = Layers(formats, torch.bfloat16)
    for name in ("key", "down"):
        layers.layers[which][f"{name}_bias"] = torch.randn(LINEARS[name][0], generator=layers.generator)

    assert_alike(layers.by_program(3, [0, 1, 2]), layers.by_operators(3, [0, 1, 2]))


FAULTS = {
    "norm of another dtype": ("first_norm", lambda t: t.double(), "a norm has the dtype of the rows"),
    "norm of another size": ("second_norm", lambda t: t[:32].clone(), "tensors of one size|size of the input"),
    "norm that is spread": ("last_norm", lambda t: t.repeat_interleave(2)[::2], "a norm has the dtype of the rows"),
    "bias of another dtype": ("key_bias", lambda t: t.double(), "a bias has a number an output"),
    "bias of another size": ("down_bias", lambda t: t[:32].clone(), "of one size|a number an output"),
    "fewer weights": ("gate", lambda t: t[:1].clone(), "weights were not packed for this layer"),
    "weights of another dtype": ("up", lambda t: t.short(), "dtype|Byte"),
    "smaller cache": ("keys", lambda t: t[:, :16].clone(), "the cache's heads and head size"),
    "cache of another dtype": ("values", lambda t: t.double(), "a cache is dense"),
    "cache that is spread": ("keys", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "a cache is dense"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("formats", ["quantised", "full"])
@pytest.mark.parametrize("which", [0, 2])
def test_a_stack_with_a_tensor_that_does_not_fit_is_refused(which, formats, fault):
    layers = Layers(formats, torch.bfloat16)
    name, change, message = FAULTS[fault]
    layers.layers[which][name] = change(layers.layers[which][name])

    with pytest.raises(RuntimeError, match=message):
        layers.by_program(3, [2])


def test_caches_of_a_later_layer_that_are_too_small_are_refused():
    layers = Layers("quantised", torch.bfloat16)
    for name in ("keys", "values"):
        layers.layers[2][name] = layers.layers[2][name][:, :16].clone()

    with pytest.raises(RuntimeError, match="step does not fit the cache"):
        layers.by_program(3, [2])


def test_a_stack_reads_the_memory_that_its_tensors_had():
    """Whoever gives a tensor other memory does not take it from under a step."""
    layers = Layers("quantised", torch.bfloat16)
    expected = layers.by_program(3, [2])

    def replace():
        for layer in layers.layers:
            layer["up"].data = torch.zeros(1, dtype=torch.uint8)

    assert_alike(layers.by_program(3, [2], behind=replace), expected)


def test_a_stack_that_is_freed_leaves_no_trace():
    """Garbage collection frees stacks at any moment, also while another model is traced."""
    number = torch.ops.yggdrasil.keep_stack([], [], [], [], [], [], [])

    def traced(x):
        drop_stack(number)
        return x + 1

    graph = make_fx(traced)(torch.zeros(2)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
