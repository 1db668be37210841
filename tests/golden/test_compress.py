"""Gradient compression: what arrives, how many bytes it takes, and what the sender keeps."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from slipstream import compress
from slipstream.compress import _bits, _positions
from slipstream.compress._bits import BLOCK
from slipstream.errors import ConfigError

MAX = np.finfo(np.float32).max
DENSE = ["none", "float16", "bfloat16", "int8", *(f"qsgd:{b}" for b in range(2, 9))]
SPARSE = [
    "topk:0.01", "topk:0.3", "topk:1", "topk:0.1,float16", "topk:0.1,int8", "topk:0.01,qsgd:8", "topk:0.1,qsgd:3",
    "topk:0.01,feedback=no", "topk:0.01,momentum=0.9,warmup=200", "topk:0.05,qsgd:4,momentum=0.5",
]  # fmt: skip
ALL = DENSE + SPARSE
SIZES = [1, 2, 7, 8, 16, 511, 512, 513, 2049, 10_000, BLOCK + 5]
FINITE = arrays(
    np.float32, st.integers(1, 1200), elements=st.floats(-float(MAX), float(MAX), width=32), fill=st.just(np.float32(0))
)
ORDINARY = arrays(np.float32, st.integers(1, 1200), elements=st.floats(-100, 100, width=32))


def made(spec, size, seed=0):
    return compress.make(spec, size, np.random.SeedSequence(seed))


def gaussian(n, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=n)).astype(np.float32)


def decoded(c, payload, n):
    out = np.full(n, np.nan, np.float32)
    c.decode(payload, out)
    return out


def there(c, g, steps=0):
    return decoded(c, c.encode(g, steps), len(g))


def ceil(a, b):
    return -(-a // b)


# -- all compressors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("n", SIZES)
def test_what_is_sent_fits_and_the_input_stays(spec, n):
    c = made(spec, n)
    g = gaussian(n)
    kept = g.copy()
    for steps in (0, 100, 1000):
        payload = c.encode(g, steps)
        assert payload.dtype == np.uint8
        assert payload.ndim == 1
        assert 0 < len(payload) <= c.capacity
        assert not np.shares_memory(payload, g)
        first, sent = decoded(c, payload, n), payload.copy()
        assert np.isfinite(first).all()
        c.encode(g, steps)  # what was sent is the receiver's now
        np.testing.assert_array_equal(payload, sent)
        at_odd_address = np.concatenate((np.zeros(1, np.uint8), sent))[1:]
        np.testing.assert_array_equal(decoded(made(spec, n, 99), at_odd_address, n), first)  # stateless
    np.testing.assert_array_equal(g, kept)


@pytest.mark.parametrize("spec", ALL)
@given(g=FINITE)
def test_any_finite_gradient_arrives_finite_and_zeros_stay_zeros(spec, g):
    c = made(spec, len(g))
    for _ in range(3):
        out = there(c, g)
        assert np.isfinite(out).all()
        assert (out[g == 0] == 0).all()


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("n", [1, 16, 3000, BLOCK + 5])
def test_padding_and_all_zeros(spec, n):
    c = made(spec, n)
    assert not there(c, np.zeros(n, np.float32)).any()
    g = gaussian(n)
    g[n // 3 :] = 0
    for _ in range(20):
        assert not there(c, g)[n // 3 :].any()


@pytest.mark.parametrize("spec", ALL)
def test_denormal_and_huge_values(spec):
    g = gaussian(3000)
    for x in (np.full(3000, 1e-45), np.full(3000, 1e-39), g * 1e-39, np.full(3000, MAX), g / 6 * MAX, -np.full(3, MAX)):
        x = x.astype(np.float32)
        out = there(made(spec, len(x)), x)
        assert np.isfinite(out).all()
        assert (out * np.sign(x) >= 0).all()


@pytest.mark.parametrize("spec", ALL)
def test_the_same_seed_gives_the_same_bytes_and_save_goes_on_bit_for_bit(spec):
    n = 3000
    a, b = made(spec, n, 5), made(spec, n, 5)
    for i in range(4):
        np.testing.assert_array_equal(a.encode(gaussian(n, i), 50 * i), b.encode(gaussian(n, i), 50 * i))
    values, kept = a.save()
    frozen = {k: v.copy() for k, v in kept.items()}
    more = [a.encode(gaussian(n, i), 50 * i) for i in range(4, 8)]
    for k, v in kept.items():
        np.testing.assert_array_equal(v, frozen[k])  # a copy, not the state itself
    resumed = made(spec, n, 6)
    resumed.restore(json.loads(json.dumps(values)), kept)
    for i, expected in zip(range(4, 8), more, strict=True):
        np.testing.assert_array_equal(resumed.encode(gaussian(n, i), 50 * i), expected)


@pytest.mark.parametrize("spec", ["int8", "qsgd:4", "topk:0.1,qsgd:4"])
def test_another_seed_gives_other_bytes(spec):
    assert (made(spec, 3000, 1).encode(gaussian(3000), 0) != made(spec, 3000, 2).encode(gaussian(3000), 0)).any()


@pytest.mark.parametrize("n", SIZES)
def test_bytes_by_formula(n):
    expected = {"none": 4 * n, "float16": 2 * n, "bfloat16": 2 * n, "int8": 4 * ceil(n, 2048) + 8 * ceil(n, 8)}
    expected |= {f"qsgd:{b}": 4 * ceil(n, 512) + b * ceil(n, 8) for b in range(2, 9)}
    for spec, size in expected.items():
        assert made(spec, n).capacity == len(made(spec, n).encode(gaussian(n), 0)) == size, spec


@pytest.mark.parametrize("n", [10_000, 1_700_000])
def test_topk_at_one_percent_is_forty_times_smaller(n):
    for spec, values in (("topk:0.01", 4), ("topk:0.01,float16", 2)):
        c = made(spec, n)
        size, k = len(c.encode(gaussian(n), 0)), n // 100
        assert 40 * c.capacity < 4 * n
        assert 8 + k + values * k <= size <= c.capacity == 8 + k + n // 255 + values * k


# -- float16 and bfloat16 ------------------------------------------------------------------------------


@given(g=FINITE)
def test_float16_is_nearest_and_saturates(g):
    out = there(made("float16", len(g)), g)
    cut = np.clip(g, -65504, 65504).astype(np.float64)
    np.testing.assert_array_equal(out, out.astype(np.float16))  # it is a float16
    unit = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(cut), 1e-60))), -14) - 10)
    assert (np.abs(out - cut) <= unit / 2 * (1 + 2.0**-12)).all()
    assert (np.signbit(out) == np.signbit(g)).all()


def test_every_finite_float16_arrives_as_it_is():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    g = halves[np.isfinite(halves)].astype(np.float32)
    np.testing.assert_array_equal(there(made("float16", len(g)), g).view(np.uint32), g.view(np.uint32))


def test_float16_agrees_with_numpy():
    g = np.concatenate([gaussian(200_000, i, s) for i, s in enumerate((1e-7, 1e-5, 1e-2, 1e3))])
    np.testing.assert_array_equal(there(made("float16", len(g)), g), g.astype(np.float16).astype(np.float32))


@given(g=FINITE)
def test_bfloat16_is_nearest_even_and_saturates(g):
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(g.copy()).to(torch.bfloat16)
    greatest = torch.finfo(torch.bfloat16).max
    expected = expected.clamp(-greatest, greatest).to(torch.float32).numpy()
    np.testing.assert_array_equal(there(made("bfloat16", len(g)), g).view(np.uint32), expected.view(np.uint32))


# -- quantization --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [8, 24, 4096])
def test_packing_is_undone_and_takes_its_bits(bits, n):
    levels = np.random.default_rng(0).integers(0, 1 << bits, n).astype(np.uint8)
    packed = _bits.pack(levels.copy(), bits)
    assert len(packed) == _bits.packed(n, bits) == n * bits // 8
    np.testing.assert_array_equal(_bits.unpack(packed, bits), levels)


def buckets(g, bucket):
    return [g[i : i + bucket].astype(np.float64) for i in range(0, len(g), bucket)]


@pytest.mark.parametrize("spec", ["int8", *(f"qsgd:{b}" for b in range(2, 9))])
@given(g=ORDINARY)
def test_an_element_moves_by_less_than_a_step(spec, g):
    out = there(made(spec, len(g)), g)
    bits = 8 if spec == "int8" else int(spec[-1])
    norm, bucket = (np.inf, 2048) if spec == "int8" else (2, 512)
    for x, y in zip(buckets(g, bucket), buckets(out, bucket), strict=True):
        step = np.linalg.norm(x, norm) / (2 ** (bits - 1) - 1)
        assert (np.abs(x - y) <= step * (1 + 1e-5) + 1e-30).all()
        assert np.abs(y).max() <= np.linalg.norm(x, norm) * (1 + 1e-5)


@pytest.mark.parametrize("spec", ["int8", *(f"qsgd:{b}" for b in range(2, 9))])
def test_quantization_is_unbiased_with_the_variance_of_the_paper(spec):
    """Mean within 5 standard errors for each element and within 3 for a sum; variance below lemma 3.1 of the paper.

    The variance itself must be that of rounding up with the probability of the fraction: step^2 f (1 - f).
    """
    n, times = 300, 4000
    g = gaussian(n, 1, 1e-3)
    c = made(spec, n, 3)
    bits = 8 if spec == "int8" else int(spec[-1])
    s = 2 ** (bits - 1) - 1
    wide = g.astype(np.float64)
    step = float(c.encode(g, 0)[:4].view(np.float32)[0])
    assert step == pytest.approx(np.linalg.norm(wide, np.inf if spec == "int8" else 2) / s, rel=1e-6)
    errors = np.array([there(c, g) for _ in range(times)], np.float64) - wide
    fraction = np.modf(np.abs(wide) / step)[0]
    variance = step**2 * fraction * (1 - fraction)
    assert (np.abs(errors.mean(0)) <= 5 * np.sqrt(variance / times) + 2.0**-14 * step).all()
    assert abs(errors.sum(1).mean()) <= 3 * np.sqrt(variance.sum() / times)
    squares = (errors**2).sum(1)
    assert squares.mean() == pytest.approx(variance.sum(), rel=0.05)
    assert squares.mean() <= min(n / s**2, n**0.5 / s) * (wide**2).sum()


def test_rounding_of_elements_and_of_calls_is_not_tied_together():
    """Over many blocks of equal values the mean error falls as for independent rounding."""
    n = 8 * BLOCK
    g = np.full(n, 0.3, np.float32)
    g[::512] = 1  # the norm of each bucket of int8
    c = made("int8", n)
    free = g != 1
    step, fraction = 1 / 127, 0.3 * 127 % 1
    means = np.array([(there(c, g)[free] - 0.3).reshape(-1, 511).mean(1) for _ in range(20)]) / step
    assert means.std() == pytest.approx(np.sqrt(fraction * (1 - fraction) / 511), rel=0.1)
    assert abs(means.mean()) < 5 * np.sqrt(fraction * (1 - fraction) / (2 * BLOCK))
    assert abs(np.corrcoef(means[0], means[1])[0, 1]) < 0.25


# -- top-k ---------------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 70_000),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["gauss", "ties", "few"]),
)
def test_the_greatest_are_found_exactly(n, share, seed, kind):
    """Against a full stable sort: the k greatest, of equals the first."""
    rng = np.random.default_rng(seed)
    x = np.abs(rng.normal(size=n)).astype(np.float32)
    if kind == "ties":
        x = np.round(2 * x)
    elif kind == "few":
        x[rng.random(n) < 0.995] = 0
    k = max(1, int(share * n))
    expected = np.sort(np.argsort(-x, kind="stable")[:k])
    np.testing.assert_array_equal(_positions.greatest(x, k), expected)


def test_the_sample_is_used_and_a_wrong_guess_is_mended(monkeypatch):
    x = np.abs(gaussian(200_000))
    expected = np.sort(np.argsort(-x, kind="stable")[:2000])
    assert 2000 <= (x >= _positions.guess(x, 2000)).sum() < 3000
    for wrong in (0.0, 1.0, 4.0, 99.0):
        monkeypatch.setattr(_positions, "guess", lambda m, k, w=wrong: np.float32(w))
        np.testing.assert_array_equal(_positions.greatest(x, 2000), expected)


@given(data=st.data(), n=st.integers(1, 200_000), seed=st.integers(0, 99))
def test_positions_are_written_and_read(data, n, seed):
    k = data.draw(st.integers(1, min(n, data.draw(st.sampled_from([1, 3, 100, n])))))
    where = np.sort(np.random.default_rng(seed).choice(n, k, replace=False))
    for p in (where, np.arange(k), np.arange(n - k, n)):
        code = _positions.write(p, n)
        assert len(code) <= _positions.length(n, k)
        np.testing.assert_array_equal(_positions.read(code, n, k), p)


def test_each_way_of_writing_positions_is_used_where_it_is_cheapest():
    n = 1_000_000
    assert [_positions.layout(n, int(n * r)) for r in (0.0001, 0.01, 0.3)] == [np.uint16, np.uint8, None]


@pytest.mark.parametrize("values", ["", ",float16"])
@given(seed=st.integers(0, 999), n=st.integers(1, 2000))
def test_nothing_is_lost(values, seed, n):
    """e_after + sent = e_before + g in every element, bit for bit."""
    c = made(f"topk:0.05{values}", n)
    for i in range(5):
        g = gaussian(n, seed + i, 10.0 ** (i - 3))
        before = c.residual + g
        sent = there(c, g)
        assert np.count_nonzero(sent) <= max(1, round(0.05 * n))
        np.testing.assert_array_equal(c.residual + sent, before)


@pytest.mark.parametrize("values", ["qsgd:2", "int8", "float16", "bfloat16"])
def test_what_rounding_took_stays_in_the_residual(values):
    c = made(f"topk:0.1,{values}", 2000)
    for i in range(5):
        before = c.residual + gaussian(2000, i, 1e5)
        sent = there(c, gaussian(2000, i, 1e5))
        np.testing.assert_array_equal(c.residual, before - sent)


def test_the_sum_of_all_that_was_sent_is_the_sum_of_all_gradients():
    """With integers no float32 sum is rounded, so this too holds bit for bit over a whole run."""
    n, rng = 5000, np.random.default_rng(0)
    c, given_, sent = made("topk:0.01", n), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for _ in range(100):
        g = rng.integers(-1000, 1000, n).astype(np.float32)
        given_ += g
        sent += there(c, g)
    np.testing.assert_array_equal(sent + c.residual, given_)
    assert np.count_nonzero(sent) > 3000  # feedback reaches far more than the same 1 %


def test_without_feedback_it_is_the_greatest_of_each_gradient():
    n = 5000
    c = made("topk:0.01,feedback=no", n)
    for i in range(3):
        g = gaussian(n, i)
        out = there(c, g)
        where = np.argsort(-np.abs(g), kind="stable")[:50]
        assert set(np.flatnonzero(out)) == set(where)
        np.testing.assert_array_equal(out[where], g[where])
    assert all(not len(a) for a in c.save()[1].values())


def test_momentum_correction_against_the_algorithm_of_the_paper():
    n, m, k = 400, 0.9, 20
    c = made(f"topk:{k / n},momentum={m}", n)
    u, v = np.zeros(n), np.zeros(n)
    for i in range(30):
        g = gaussian(n, i)
        u = m * u + g
        v = v + u
        mask = np.zeros(n, bool)
        mask[np.argsort(-np.abs(v))[:k]] = True
        np.testing.assert_allclose(there(c, g), np.where(mask, v, 0), rtol=1e-4, atol=1e-4)
        u[mask] = v[mask] = 0


def test_warm_up_sends_a_quarter_then_ever_less():
    n = 100_000
    c = made("topk:0.001,warmup=1000", n)
    g = gaussian(n)
    counts = [int(c.encode(g, steps)[:4].view(np.uint32)[0]) for steps in range(0, 1501, 250)]
    expected = [round(n * 0.25 * (0.004) ** min(1, s / 1000)) for s in range(0, 1501, 250)]
    assert counts == expected
    assert counts[0] == 25_000
    assert counts[-1] == counts[-3] == 100


def test_at_least_one_element_is_sent():
    for n in (1, 3, 16, 40):
        assert np.count_nonzero(there(made("topk:0.01", n), gaussian(n))) == 1


def test_feedback_converges_where_dropping_does_not():
    """1 % of a quadratic whose noise is greatest where there is nothing to learn.

    Plain top-k sends those elements for ever; with the residual the others get their turn.
    """
    n = 1000
    rng = np.random.default_rng(0)
    target = np.ones(n, np.float32)
    noise = np.where(np.arange(n) < 20, 30.0, 0.01).astype(np.float32)

    def distance(spec):
        c, w = made(spec, n), np.zeros(n, np.float32)
        for _ in range(6000):
            g = w - target + noise * rng.normal(size=n).astype(np.float32)
            w -= np.float32(0.005) * there(c, g)
        return np.linalg.norm((w - target)[20:]) / np.linalg.norm(target[20:])

    assert distance("topk:0.01") < 0.1
    assert distance("topk:0.01,feedback=no") > 0.9


# -- specs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topp:0.1", ["'topp'", "topk", "Did you mean"]),
        ("", ["''", "float16", "none"]),
        ("_bits", ["'_bits'", "Valid"]),
        ("float16:3", ["float16", "':3'", "no argument"]),
        ("none,qsgd:4", ["none", "'qsgd:4'", "no options"]),
        ("int8:4", ["int8", "no argument"]),
        ("qsgd", ["'qsgd:'", "2 to 8"]),
        ("qsgd:9", ["'qsgd:9'", "2 to 8"]),
        ("qsgd:1", ["'qsgd:1'", "2 to 8"]),
        ("qsgd:4,feedback=no", ["'feedback=no'", "qsgd:BITS"]),
        ("topk", ["ratio ''", "above 0 and at most 1"]),
        ("topk:0", ["ratio '0'", "above 0 and at most 1"]),
        ("topk:1.5", ["ratio '1.5'", "above 0 and at most 1"]),
        ("topk:nan", ["ratio 'nan'", "above 0"]),
        ("topk:0.1,feedbak=no", ["'feedbak'", "Did you mean 'feedback'"]),
        ("topk:0.1,feedback=maybe", ["'maybe'", "yes"]),
        ("topk:0.1,momentum", ["'momentum'", "momentum=0.9"]),
        ("topk:0.1,momentum=1", ["momentum '1'", "below 1"]),
        ("topk:0.1,warmup=-5", ["warmup '-5'", "whole number"]),
        ("topk:0.1,warmup=1,warmup=2", ["warmup twice"]),
        ("topk:0.1,qsgd:4,int8", ["values twice", "'int8'"]),
        ("topk:0.1,topk:0.1", ["cannot send the values of topk"]),
        ("topk:0.1,qsgd:40", ["'qsgd:40'", "2 to 8"]),
        ("topk:0.1,flaot16", ["'flaot16'", "Did you mean"]),
        ("topk:0.1,feedback=no,momentum=0.9", ["momentum", "feedback=yes"]),
    ],
)
def test_a_wrong_spec_says_what_is_allowed(spec, words):
    with pytest.raises(ConfigError) as e:
        compress.check(spec)
    assert str(e.value).startswith("compress: ")
    for word in words:
        assert word in str(e.value)
    with pytest.raises(ConfigError):
        made(spec, 10)


@pytest.mark.parametrize("spec", ALL)
def test_a_right_spec_passes(spec):
    compress.check(spec)


def test_the_supervising_process_checks_specs_without_torch():
    code = (
        "import sys; from slipstream import compress; "
        "[compress.check(s) for s in ('none', 'float16', 'bfloat16', 'int8', 'qsgd:4', 'topk:0.01,qsgd:8')]; "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "False\n"
