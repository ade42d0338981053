"""Residuals in a distributed checkpoint: as many ranks get the same bits, other worlds the same sums."""

import pytest
import torch

WALL_S = 60
pytestmark = pytest.mark.timeout(3 * WALL_S + 30)


@pytest.mark.rest
def test_residuals_go_through_a_distributed_checkpoint(said, tmp_path):
    folder = tmp_path / "saved"
    saved, _ = said("dcp_program.py", 4, "save", folder, wall_s=WALL_S)
    same, _ = said("dcp_program.py", 4, "load", folder, wall_s=WALL_S)
    other, _ = said("dcp_program.py", 2, "load", folder, wall_s=WALL_S)

    def by_rank(lines, key):
        return {line["rank"]: line[key] for line in lines}

    assert by_rank(saved, "digest") == by_rank(same, "digest")
    assert len(set(by_rank(saved, "digest").values())) == 4  # every rank has other residuals
    assert by_rank(saved, "after") == by_rank(same, "after")
    assert {line["step"] for line in other} == {3}
    assert len(set(by_rank(other, "after").values())) == 1
    before, after = (torch.load(f"{folder}-mean-{what}-0.pt") for what in ("save-4", "load-2"))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)
    assert before.norm() > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_without_a_state_says_so(tmp_path):
    from torch.distributed import checkpoint as dcp

    from thinwire import InputError, hooks
    from thinwire.integrations import load_sharded

    dcp.save({"model": {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(InputError, match="no state of thinwire under 'thinwire'"):
        load_sharded(hooks.get("onebit")[0], tmp_path / "saved")
