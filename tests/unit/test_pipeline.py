"""Settings of pipelines, and what both ends keep of samples that return: what needs no processes."""

import subprocess
import sys

import pytest
import torch

from thinwire import codecs
from thinwire.errors import CodecError, InputError
from thinwire.integrations import pipeline
from thinwire.parallel.pipeline_delta import Kept
from thinwire.parallel.pipeline_handle import print_summary
from thinwire.parallel.pipeline_settings import Settings, fitting
from thinwire.rounding import Stream

PLACE = ("sent", 0, 0)


@pytest.mark.parametrize("spec", ["int4/128+ef", "topk/0.01+ef", "onebit/512+ef:bf16"])
@pytest.mark.parametrize("where", ["forward", "backward", "first"])
def test_residuals_are_refused_with_the_reason(spec, where):
    with pytest.raises(CodecError, match=r"a residual belongs to the samples.*use .*delta=True") as error:
        Settings.of("int8", **{where: spec}, delta=True)
    assert f"{where}={spec}" in str(error.value)
    assert "+ef" not in str(error.value).partition("use ")[2]


def test_codecs_whose_ranks_must_agree_are_refused():
    with pytest.raises(CodecError, match="a message has one sender"):
        Settings.of("aps/e5m2")


def test_changes_need_a_codec_that_fits_them():
    with pytest.raises(InputError, match="forward='int4'"):
        Settings.of(None, delta=True)
    with pytest.raises(CodecError, match="is fixed"):
        Settings.of("e4m3~offset0", delta=True)


def test_a_direction_overrides_the_codec_and_fp32_means_torch():
    settings = Settings.of("int8", forward="int4", backward="fp32")
    assert settings.codec("forward") == codecs.get("int4")
    assert settings.codec("backward") is None
    assert settings == Settings.of("fp32", forward=codecs.get("int4"))
    assert Settings.of("int8", None, None) == Settings.of(None) == Settings.of("fp32")
    assert Settings.of("int8").codec("backward") == codecs.get("int8")
    assert len({Settings.of("int8", delta=delta, seed=seed).text for delta in (0, 1) for seed in (0, 1)}) == 4


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "why"),
    [
        ("int8", (1023,), torch.float32, "fewer than 1024"),
        ("int8", (1024,), torch.float64, "not float32"),
        ("int8", (1024,), torch.bool, "not float32"),
        ("bf16", (64, 64), torch.bfloat16, "no smaller"),
        ("topk/0.9", (64, 64), torch.float16, "no smaller"),
        ("int8", (2, 512), torch.bfloat16, ""),
        ("fp16", (2, 512), torch.float32, ""),
    ],
)
def test_shape_and_dtype_decide_what_is_encoded(spec, shape, dtype, why):
    codec, said = fitting(codecs.get(spec), shape, dtype)
    assert (codec is None) == bool(why)
    assert why in said
    assert why or said == ""


def test_codecs_that_use_rows_and_columns_see_the_shape():
    codec, _ = fitting(codecs.get("dct/64:8"), (128, 96), torch.float32)
    assert codec.spec == "dct/64:8@128x96"


@pytest.mark.parametrize("spec", ["int4/128", "int8/256", "qsgd4/512", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_ends_keep_the_same_bits(spec, dtype):
    codec, made = codecs.get(spec), torch.Generator().manual_seed(0)
    ends = [Kept(codecs.get("bf16")) for _ in range(2)]
    x = torch.randn(40, 64, generator=made).to(dtype)
    errors = []
    for visit in range(6):
        for end in ends:
            end.coming = "a"
            end.begin_step()
        used = [end.codec(codec, PLACE, (40, 64)) for end in ends]
        assert used == [codec if visit else codecs.get("bf16")] * 2
        wire, out = torch.empty(used[0].nbytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
        rng = Stream(1, step=visit) if used[0].needs_rng else None
        ends[0].encode(used[0], x, wire, PLACE, rng)
        ends[1].decode(used[1], wire, out, PLACE)
        kept = [end.find(PLACE) for end in ends]
        assert torch.equal(kept[0], kept[1])
        assert torch.equal(kept[0], out)
        assert kept[0].dtype == dtype
        errors.append(float((out - x).float().norm() / x.float().norm()))
        x = x + 0.01 * torch.randn(40, 64, generator=made).to(dtype)  # the network learns
    assert max(errors) < 0.02
    assert errors[-1] < 0.005, errors
    assert ends[0].nbytes == x.nbytes


def test_numbers_that_are_not_finite_are_not_kept():
    kept, codec = Kept(codecs.get("bf16")), codecs.get("int8/256")
    for value in (1.0, float("inf"), 2.0):
        kept.coming = "a"
        kept.begin_step()
        used = kept.codec(codec, PLACE, (512,))
        wire = torch.empty(used.nbytes(512), dtype=torch.uint8)
        kept.encode(used, torch.full((512,), value), wire, PLACE, None)
        assert kept.find(PLACE).isfinite().all()
    assert torch.allclose(kept.find(PLACE), torch.tensor(2.0), atol=0.02)


def test_samples_without_a_name_are_not_kept():
    kept, x = Kept(codecs.get("bf16")), torch.randn(2048)
    kept.coming = None
    kept.begin_step()
    kept.check_named()
    wire, out = torch.empty(4096, dtype=torch.uint8), torch.empty(2048)
    kept.encode(kept.codec(codecs.get("int4"), PLACE, (2048,)), x, wire, PLACE, None)
    kept.decode(kept.first, wire, out, PLACE)
    assert torch.equal(out, x.bfloat16().float())
    assert kept.nbytes == 0
    kept.begin_step()
    with pytest.raises(InputError, match=r"handle.batch\(name\)"):
        kept.check_named()


def test_the_summary_has_a_row_for_every_direction_that_sent(capsys):
    sent = {"codec": "int8/256", "messages": 8, "sent_nbytes": 2000, "plain_nbytes": 8000, "error": 0.0071,
            "as_is": {"fewer than 1024 elements": 3}}  # fmt: skip
    none = {**sent, "messages": 0}
    print_summary(
        {"steps": 2, "messages": 8, "sent_nbytes": 2e6, "plain_nbytes": 8e6, "ratio": 4.0, "kept_nbytes": 5e6,
         "stages": {3: {"forward": sent, "backward": none}}}
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "2 steps, 8 messages, 2.0 MB sent instead of 8.0 MB (4.00x fewer)" in said
    assert "5.0 MB of activations kept" in said
    assert "0.0071" in said
    assert "3: fewer than 1024 elements" in said
    assert "forward" in said
    assert "backward" not in said


def test_nothing_but_a_stage_is_a_stage():
    assert not pipeline.is_stage(torch.nn.Linear(1, 1))
    assert not pipeline.is_stage([])
    with pytest.raises(InputError, match=r"a stage of torch.distributed.pipelining.*not Linear"):
        pipeline.attach(torch.nn.Linear(1, 1))


def test_asking_what_is_a_stage_does_not_load_pipelining():
    program = (
        "import sys, thinwire.parallel, thinwire.integrations.pipeline as p; assert not p.is_stage(1); "
        "assert 'torch.distributed.pipelining.stage' not in sys.modules; "
        "assert thinwire.parallel.PipelineStage; assert 'torch.distributed.pipelining.stage' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
