"""Specs: a codec in a short string.

    spec    = body [ "+ef" [ ":" residual ] ]
    body    = name [ "/" argument ] { "~" option }
    residual = "bf16" | "8bit"

`name` is a family below or any number format. The argument is a block length, a fraction or a format,
depending on the family. A name alone means the same everywhere: `int8` is int8/256, `int4` is int4/128, `fp8`
is e4m3fn/128 and `onebit` is onebit/512. Any other format has one scale for the whole vector, as with
`/tensor`: the vector's largest magnitude becomes the format's largest number, or 1 for posits, which are
finest there. Only `~offset` fixes the scale: `~offset0` is a scale of 1, so that numbers too small or too
large are lost.

    int8/256             256 elements share a float32 scale; the same as int8
    int8/tensor          one scale for the whole vector
    posit8_1             one scale for the whole vector; the same as posit8_1/tensor
    posit8_1~offset0     numbers as they are, without a scale
    int4/128~sr          rounded at random
    e5m2/128~bf16        scales stored as bfloat16
    topk/0.01~fp16+ef    one element in a hundred, as float16, with error feedback
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from thinwire.codecs import own
from thinwire.codecs.base import RESIDUALS, Codec
from thinwire.codecs.block import Block
from thinwire.codecs.cast import DTYPES, Cast
from thinwire.codecs.dct import DctTopK
from thinwire.codecs.maxmin import MaxMin
from thinwire.codecs.names import ALIASES, BLOCKS, STORES, WHOLE, format_of, name_of, shortest
from thinwire.codecs.onebit import OneBit, OneBitColumn
from thinwire.codecs.sparse import MSTopK, RandomK, Threshold, TopK
from thinwire.errors import CodecError, FormatError, UnknownCodecError, unknown
from thinwire.formats import FORMATS, Float, Table, exponential
from thinwire.rounding import Rounding
from thinwire.scaling import Scaling

ROUNDINGS = {"sr": Rounding.STOCHASTIC, **{mode.value: mode for mode in Rounding}}
MX = {
    "mxfp8": "float8_e4m3fn",
    "mxfp8e5": "float8_e5m2",
    "mxfp6": "float6_e2m3fn",
    "mxfp6e3": "float6_e3m2fn",
    "mxfp4": "float4_e2m1fn",
    "mxint8": "fixed2.6",
}
NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
MX_SCALING = Scaling("floor", store="e8m0")


@dataclass(frozen=True)
class Parts:
    """A body, split at its slash and its tildes."""

    text: str
    name: str
    argument: str
    options: tuple[str, ...]

    def refuse(self, why: str) -> UnknownCodecError:
        return UnknownCodecError(f"'{self.text}': {why}")

    def no_argument(self) -> None:
        if self.argument:
            raise self.refuse(f"{self.name} takes no '/{self.argument}'")

    def no_options(self) -> None:
        if self.options:
            raise self.refuse(f"{self.name} takes no '~{self.options[0]}'")

    def block(self, default: int | None = None, *, whole: bool = False) -> int | None:
        """Return the block length; None means the whole vector, which only some families accept (`whole`)."""
        if not self.argument:
            return default
        if whole and self.argument == WHOLE:
            return None
        if not re.fullmatch(r"[1-9][0-9]*", self.argument):
            raise self.refuse(f"a block is a number of elements, not '{self.argument}'")
        return int(self.argument)

    def number(self, what: str) -> float:
        try:
            return float(self.argument)
        except ValueError:
            raise self.refuse(f"{self.name} needs {what} after the slash, not '{self.argument}'") from None


def parse(spec: str) -> Codec:
    """Return the codec of a spec."""
    body, plus, ef = spec.partition("+")
    names = {"ef": "float32", **{f"ef:{short}": dtype for dtype, short in RESIDUALS.items() if short}}
    if plus and ef not in names:
        raise UnknownCodecError(f"'{spec}': after '+' use one of: {', '.join(names)}; not '{ef}'")
    head, *options = body.split("~")
    name, slash, argument = head.partition("/")
    if slash and not argument:
        raise UnknownCodecError(f"'{spec}': nothing follows the slash")
    parts = Parts(body, name, argument, tuple(options))
    try:
        codec = own.CODECS.get(body) or _build(parts)
    except UnknownCodecError:
        raise
    except (CodecError, FormatError) as error:
        raise UnknownCodecError(f"'{spec}': {error}") from None
    return codec.with_feedback(names[ef]) if plus else codec


def _build(parts: Parts) -> Codec:
    if parts.name in FAMILIES:
        return FAMILIES[parts.name](parts)
    for pattern, build in WIDTHS.items():
        match = re.fullmatch(pattern, parts.name)
        if match:
            return build(parts, int(match.group(1)))
    return _block(parts)


# Block codecs


def _block(parts: Parts) -> Block:
    try:
        format = format_of(parts.name)
    except FormatError as error:
        raise (parts.refuse(str(error)) if "#" in parts.name else _unknown(parts)) from None
    rounding, scaling = _options(parts, Rounding.NEAREST, Scaling())
    return Block(format, parts.block(BLOCKS.get(parts.name), whole=True), rounding, scaling)


def _options(parts: Parts, rounding: Rounding, scaling: Scaling) -> tuple[Rounding, Scaling]:
    for option in parts.options:
        valued = re.fullmatch(rf"(p|rms|cells|offset)({NUMBER})", option)
        if option in ROUNDINGS:
            rounding = ROUNDINGS[option]
        elif option in STORES:
            scaling = replace(scaling, store=STORES[option])
        elif option in ("pow2", "floor", "l2", "absmax"):
            scaling = replace(scaling, choose=option)
        elif option == "shared":
            scaling = replace(scaling, shared=True)
        elif option in ("world", "sqrt"):
            scaling = replace(scaling, margin=option)
        elif valued:
            kind = {"p": "percentile", "offset": "fixed"}.get(valued.group(1), valued.group(1))
            scaling = replace(scaling, choose=kind, value=float(valued.group(2)))
        else:
            raise parts.refuse(_no_option(option))
    return rounding, scaling


def _no_option(option: str) -> str:
    """Return the error text for an unknown option: with the nearest option, or all of them."""
    near = difflib.get_close_matches(option, re.findall(r"[a-z][a-z0-9.]+", OPTIONS), n=1)
    hint = f"did you mean '~{near[0]}'? docs/codecs.md lists all" if near else f"options: {OPTIONS}"
    return f"no option '~{option}'; {hint}"


OPTIONS = (
    "sr or another rounding; absmax, pow2, floor, l2, p99.9, rms2.5, cells4, offset1 (choice of scale); "
    "f32, bf16, e8m0 (its storage; e8m0 after pow2 or floor); shared (ranks agree on it); "
    "world, sqrt (room left for a sum over ranks)"
)


# Block codecs with names of their own


def _mx(parts: Parts) -> Block:
    parts.no_argument()
    rounding, scaling = _options(parts, Rounding.NEAREST, MX_SCALING)
    label = parts.name + ("" if rounding == Rounding.NEAREST else "~sr")
    if rounding not in (Rounding.NEAREST, Rounding.STOCHASTIC) or scaling not in (
        MX_SCALING,
        replace(MX_SCALING, choose="pow2"),
    ):
        raise parts.refuse("the MX formats take ~sr, and ~pow2 for scales that never saturate; nothing else")
    label += "~pow2" * (scaling.choose == "pow2")
    return Block(MX[parts.name], 32, rounding, scaling, label=label)


def _nvfp4(parts: Parts) -> Block:
    parts.no_argument()
    rounding, scaling = _options(parts, Rounding.NEAREST, Scaling(store="e4m3"))
    if scaling != Scaling(store="e4m3"):
        raise parts.refuse("nvfp4's scales are fixed by its definition; it takes a rounding and nothing else")
    label = "nvfp4" + (
        "" if rounding == Rounding.NEAREST else "~sr" if rounding is Rounding.STOCHASTIC else f"~{rounding}"
    )
    return Block("float4_e2m1fn", 16, rounding, scaling, label=label)


def _qsgd(parts: Parts, bits: int) -> Block:
    rounding, scaling = _options(parts, Rounding.STOCHASTIC, Scaling())
    default = {2: 128, 16: 8192}.get(bits, 512)  # as in the paper's experiments
    block = parts.block(None if scaling.shared else default, whole=True)
    if rounding != Rounding.STOCHASTIC or scaling.choose not in ("absmax", "l2"):
        raise parts.refuse("QSGD rounds at random and scales by the largest magnitude (default) or ~l2")
    label = (
        f"qsgd{bits}"
        + (f"/{block or WHOLE}" if block or not scaling.shared else "")
        + "~l2" * (scaling.choose == "l2")
        + "~shared" * scaling.shared
    )
    if scaling.store != "float32" or scaling.margin:
        raise parts.refuse(
            "QSGD stores scales as float32; for other scales write a block codec, as in int4/512~sr~bf16"
        )
    return Block(f"int{bits}", block, rounding, scaling, label=label)


def _nuqsgd(parts: Parts, bits: int) -> Block:
    parts.no_options()
    block = parts.block(8192)
    if not 2 <= bits <= 8:
        raise parts.refuse(f"NUQSGD has 2 to 8 bits, not {bits}")
    levels = Table(exponential(bits), label=f"nuqsgd{bits}")
    return Block(levels, block, Rounding.STOCHASTIC, Scaling("l2"), label=f"nuqsgd{bits}/{block}")


def _terngrad(parts: Parts) -> Block:
    rounding, scaling = _options(parts, Rounding.STOCHASTIC, Scaling())
    if (
        rounding != Rounding.STOCHASTIC
        or scaling.choose not in ("absmax", "rms")
        or scaling.store != "float32"
        or scaling.margin
    ):
        raise parts.refuse(
            "TernGrad rounds at random; ~rms2.5 clips at 2.5 standard deviations, ~shared makes ranks agree"
        )
    block = parts.block(whole=True)
    label = "terngrad" + (f"/{block}" if block else "")
    label += f"~rms{shortest(scaling.value)}" * (scaling.choose == "rms") + "~shared" * scaling.shared
    return Block("int2", block, rounding, scaling, label=label)


def _cntk(parts: Parts, bits: int) -> Block:
    parts.no_options()
    block = parts.block(512)
    if bits not in (2, 4, 8):
        raise parts.refuse(f"CNTK's multi-bit mode has 2, 4 or 8 bits here, not {bits}")
    return Block(f"int{bits}", block, scaling=Scaling("cells", 4.0), label=f"cntk{bits}/{block}")


def _aps(parts: Parts) -> Block:
    parts.no_options()
    format = format_of(parts.argument) if parts.argument else None
    if not isinstance(format, Float):
        raise parts.refuse("APS scales floats: write aps/e5m2, aps/e4m3, aps/e3m0, ...")
    scaling = Scaling("pow2", store="e8m0", shared=True, margin="world")
    return Block(format, None, scaling=scaling, label=f"aps/{name_of(format)}")


def _fp8lm(parts: Parts) -> Block:
    parts.no_argument()
    parts.no_options()
    scaling = Scaling("pow2", shared=True, margin="sqrt")
    return Block("float8_e4m3fn", None, scaling=scaling, label="fp8lm")


# Others


def _cast(parts: Parts) -> Cast:
    parts.no_argument()
    parts.no_options()
    return Cast(parts.name)


def _maxmin(parts: Parts, bits: int) -> MaxMin:
    rounding, scaling = _options(parts, Rounding.NEAREST, Scaling())
    if scaling != Scaling():
        raise parts.refuse("max-min takes ~sr and nothing else")
    return MaxMin(bits, parts.block(1024) or 0, rounding)


def _onebit(parts: Parts) -> Codec:
    threshold = "zero"
    for option in parts.options:
        if option not in ("zero", "mean"):
            raise parts.refuse(f"one-bit thresholds are ~zero (default) and ~mean, not '~{option}'")
        threshold = option
    column = re.fullmatch(r"column(?::(\d+)(t?))?", parts.argument)
    if column:
        rows = int(column.group(1)) if column.group(1) else None
        return OneBitColumn(rows, bool(column.group(2)), threshold)
    return OneBit(parts.block(512) or 0, threshold)


def _sign(parts: Parts) -> OneBit:
    parts.no_options()
    return OneBit(parts.block(64) or 0, "sign")


def _values(parts: Parts, known: tuple[str, ...] = ()) -> tuple[Codec, list[str]]:
    """Return the codec of a sparse codec's values, and the family's own options."""
    own = [option for option in parts.options if any(re.fullmatch(each, option) for each in known)]
    others = [option for option in parts.options if option not in own]
    try:
        return (parse("~".join(others)) if others else Cast("fp32")), own
    except UnknownCodecError as error:
        raise parts.refuse(str(error)) from None


def _topk(parts: Parts) -> TopK:
    values, _ = _values(parts)
    return TopK(parts.number("a fraction, as in topk/0.01,"), values)


def _mstopk(parts: Parts) -> MSTopK:
    values, own = _values(parts, (r"rounds\d+",))
    fraction = parts.number("a fraction, as in mstopk/0.01,")
    return MSTopK(fraction, values, int(own[-1][6:])) if own else MSTopK(fraction, values)


def _randomk(parts: Parts) -> RandomK:
    values, own = _values(parts, ("unbiased",))
    return RandomK(parts.number("a fraction, as in randomk/0.01,"), values, bool(own))


def _threshold(parts: Parts) -> Threshold:
    values, own = _values(parts, (f"cap{NUMBER}",))
    number = parts.number("a magnitude, as in threshold/0.001,")
    return Threshold(number, float(own[-1][3:]), values) if own else Threshold(number, values=values)


def _dct(parts: Parts) -> DctTopK:
    values, _ = _values(parts)
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)(?:@([1-9]\d*)x([1-9]\d*))?", parts.argument, re.ASCII)
    if not match:
        raise parts.refuse("write dct/CHUNK:KEPT, as in dct/64:8")
    chunk, kept, rows, columns = (int(each) if each else 0 for each in match.groups())
    codec = DctTopK(chunk, kept, values)
    return codec.for_shape((rows, columns)) if rows else codec


#: Families by name.
FAMILIES: dict[str, Callable[[Parts], Codec]] = {
    **dict.fromkeys(DTYPES, _cast),
    **dict.fromkeys(MX, _mx),
    "nvfp4": _nvfp4,
    "terngrad": _terngrad,
    "aps": _aps,
    "fp8lm": _fp8lm,
    "onebit": _onebit,
    "sign": _sign,
    "topk": _topk,
    "mstopk": _mstopk,
    "randomk": _randomk,
    "threshold": _threshold,
    "dct": _dct,
}
#: Families by name and number of bits.
WIDTHS: dict[str, Callable[[Parts, int], Codec]] = {
    r"qsgd(\d+)": _qsgd,
    r"nuqsgd(\d+)": _nuqsgd,
    r"cntk(\d+)": _cntk,
    r"maxmin(\d+)": _maxmin,
}


def _unknown(parts: Parts) -> UnknownCodecError:
    """Return the error for an unknown name: it suggests the nearest one, with the rest of the spec."""
    bits = "".join(re.findall(r"\d+", parts.name)) or "4"
    widths = [pattern.replace(r"(\d+)", bits) for pattern in WIDTHS]
    names = (*FAMILIES, *widths, *ALIASES, *FORMATS)
    if parts.name == "float32":  # whose nearest name, float16, is not what was meant
        names = ("fp32",)
    rest = parts.text.removeprefix(parts.name)
    return UnknownCodecError(unknown("codec", parts.name, names, "`thinwire codecs` lists all", rest))
