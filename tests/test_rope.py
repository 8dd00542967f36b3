"""Moving keys: against a rotation written out here, axis by axis."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vlcache.rope import Rope, rotate

HEAD = 16
FREQUENCIES = tuple((1.0 / (1e6 ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD))).tolist())

# Which axis turns each of the 8 pairs, by hand: Qwen2-VL lays t, h and w side by side; Qwen3-VL deals them out in
# turn from t h w t h w on until h and w have theirs or the pairs end, and t keeps what is left.
ROPES = {
    "1d": (Rope("1d", FREQUENCIES), [0, 0, 0, 0, 0, 0, 0, 0]),
    "mrope": (Rope("mrope", FREQUENCIES, (2, 3, 3)), [0, 0, 1, 1, 1, 2, 2, 2]),
    "mrope-interleaved": (Rope("mrope-interleaved", FREQUENCIES, (4, 2, 2)), [0, 1, 2, 0, 1, 2, 0, 0]),
}
MOVES = [1, 7, -3, 250, 4096, 20000]


@pytest.fixture(params=sorted(ROPES))
def case(request: pytest.FixtureRequest) -> tuple[Rope, list[int]]:
    return ROPES[request.param]


def picture(rope: Rope, start: int, t: int = 2, h: int = 3, w: int = 4) -> Tensor:
    """Positions of a picture's or a video's tokens: t, h and w count from `start`; 1-D ones count tokens."""
    if rope.kind == "1d":
        return start + torch.arange(t * h * w)[None]
    grid = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
    return start + torch.stack(grid).reshape(3, -1)


def reference_angles(axis_of: list[int], positions: Tensor) -> Tensor:
    """float32 position times float32 frequency, pair by pair, `[N, pairs]`."""
    columns = [
        positions[axis].to(torch.float32) * torch.tensor(frequency, dtype=torch.float32)
        for axis, frequency in zip(axis_of, FREQUENCIES, strict=True)
    ]
    return torch.stack(columns, dim=-1)


def engine_keys(axis_of: list[int], plain: Tensor, positions: Tensor, scaling: float = 1.0) -> Tensor:
    """Unrotated keys `[N, H, D]` rotated as an engine does: x * cos + rotate_half(x) * sin."""
    angles = reference_angles(axis_of, positions)
    cos, sin = ((torch.cat((f, f), -1) * scaling)[:, None] for f in (angles.cos(), angles.sin()))
    half = HEAD // 2
    x, tail = plain[..., :HEAD], plain[..., HEAD:]
    turned = x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
    return torch.cat((turned, tail), -1)


def make_keys(tokens: int, head_dim: int = HEAD) -> Tensor:
    return torch.randn(tokens, 2, head_dim, generator=torch.Generator().manual_seed(tokens))


def test_the_axis_of_each_pair_is_the_hand_written_one(case: tuple[Rope, list[int]]) -> None:
    rope, axis_of = case
    assert rope.axis_of_pair() == axis_of
    assert rope.axes == (3 if len(rope.sections) else 1)


def test_interleaved_axes_end_with_the_pairs() -> None:
    """Sections 2, 3, 3 of 8 pairs: pair 8 of w would be past the end, as the engine's slice has it."""
    rope, axis_of = Rope("mrope-interleaved", FREQUENCIES, (2, 3, 3)), [0, 1, 2, 0, 1, 2, 0, 1]
    assert rope.axis_of_pair() == axis_of
    old, new = picture(rope, 15), picture(rope, 400)
    plain = make_keys(old.shape[1])
    moved = rotate(engine_keys(axis_of, plain, old), rope.turn(old, new))
    torch.testing.assert_close(moved, engine_keys(axis_of, plain, new), rtol=0, atol=1e-5)


@pytest.mark.parametrize("start", [0, 11, 20000])
@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_cos_and_sin_equal_the_reference(case: tuple[Rope, list[int]], start: int, scaling: float) -> None:
    rope, axis_of = case
    positions = picture(rope, start)
    angles = reference_angles(axis_of, positions)
    cos, sin = replace(rope, scaling=scaling).cos_sin(positions, torch.float32)
    assert cos.shape == sin.shape == (positions.shape[1], HEAD)
    for half in (slice(0, HEAD // 2), slice(HEAD // 2, HEAD)):
        torch.testing.assert_close(cos[:, half], angles.cos() * scaling, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin[:, half], angles.sin() * scaling, rtol=0, atol=1e-6)


def test_cos_and_sin_come_in_the_dtype_asked_for(case: tuple[Rope, list[int]]) -> None:
    rope, _ = case
    cos, sin = rope.cos_sin(picture(rope, 5), torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16


@pytest.mark.parametrize("by", MOVES)
@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_moved_keys_equal_keys_rotated_there(case: tuple[Rope, list[int]], by: int, scaling: float) -> None:
    rope, axis_of = case
    rope = replace(rope, scaling=scaling)
    old = picture(rope, 15)
    new = old + by
    plain = make_keys(old.shape[1])
    moved = rotate(engine_keys(axis_of, plain, old, scaling), rope.turn(old, new))
    torch.testing.assert_close(moved, engine_keys(axis_of, plain, new, scaling), rtol=0, atol=1e-5)
    assert not torch.allclose(moved, engine_keys(axis_of, plain, old, scaling), atol=1e-2)


@pytest.mark.parametrize("start", [19_000, 30_000])
def test_keys_captured_far_out_move_home(case: tuple[Rope, list[int]], start: int) -> None:
    rope, axis_of = case
    old, new = picture(rope, start), picture(rope, 3)
    plain = make_keys(old.shape[1])
    moved = rotate(engine_keys(axis_of, plain, old), rope.turn(old, new))
    torch.testing.assert_close(moved, engine_keys(axis_of, plain, new), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [name for name in sorted(ROPES) if name != "1d"])
@pytest.mark.parametrize("vector", [(1, 0, 0), (0, 5, 0), (0, 0, -2), (2, -1, 7), (12000, 3, 500)])
def test_a_video_step_moves_by_a_vector(kind: str, vector: tuple[int, int, int]) -> None:
    rope, axis_of = ROPES[kind]
    old = picture(rope, 40)
    new = old + torch.tensor(vector)[:, None]
    plain = make_keys(old.shape[1])
    before = engine_keys(axis_of, plain, old)
    moved = rotate(before, rope.turn(old, new))
    torch.testing.assert_close(moved, engine_keys(axis_of, plain, new), rtol=0, atol=1e-5)
    for pair, axis in enumerate(axis_of):
        if vector[axis] == 0:
            assert torch.equal(moved[..., pair], before[..., pair]), "an axis that stands still turned"
            assert torch.equal(moved[..., pair + HEAD // 2], before[..., pair + HEAD // 2])


def test_tokens_may_move_by_different_amounts(case: tuple[Rope, list[int]]) -> None:
    rope, axis_of = case
    old = picture(rope, 9)
    new = old.flip(1) * 3
    plain = make_keys(old.shape[1])
    moved = rotate(engine_keys(axis_of, plain, old), rope.turn(old, new))
    torch.testing.assert_close(moved, engine_keys(axis_of, plain, new), rtol=0, atol=1e-5)


def test_turns_compose(case: tuple[Rope, list[int]]) -> None:
    rope, _ = case
    p, q, r = picture(rope, 4), picture(rope, 900), picture(rope, 15_000)
    keys = make_keys(p.shape[1])
    twice = rotate(rotate(keys, rope.turn(p, q)), rope.turn(q, r))
    torch.testing.assert_close(twice, rotate(keys, rope.turn(p, r)), rtol=0, atol=1e-5)
    there_and_back = rotate(rotate(keys, rope.turn(p, r)), rope.turn(r, p))
    torch.testing.assert_close(there_and_back, keys, rtol=0, atol=1e-5)


def test_equal_positions_need_no_turn(case: tuple[Rope, list[int]]) -> None:
    rope, _ = case
    positions = picture(rope, 77)
    assert rope.turn(positions, positions.clone()) is None
    keys = make_keys(positions.shape[1])
    assert torch.equal(rotate(keys, None), keys)


def test_one_token_elsewhere_is_a_turn_that_leaves_the_others(case: tuple[Rope, list[int]]) -> None:
    rope, _ = case
    old = picture(rope, 77)
    new = old.clone()
    new[:, 5] += 3
    keys = make_keys(old.shape[1])
    moved = rotate(keys, rope.turn(old, new))
    others = [i for i in range(old.shape[1]) if i != 5]
    assert torch.equal(moved[others], keys[others])
    assert not torch.allclose(moved[5], keys[5], atol=1e-2)


def test_dims_beyond_the_rotary_pairs_are_untouched(case: tuple[Rope, list[int]]) -> None:
    rope, axis_of = case
    old = picture(rope, 6)
    new = old + 1234
    plain = make_keys(old.shape[1], HEAD + 6)
    moved = rotate(engine_keys(axis_of, plain, old), rope.turn(old, new))
    assert torch.equal(moved[..., HEAD:], plain[..., HEAD:])
    torch.testing.assert_close(moved, engine_keys(axis_of, plain, new), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_keep_their_dtype_and_turn_in_fp32(
    case: tuple[Rope, list[int]], dtype: torch.dtype
) -> None:
    rope, _ = case
    old, new = picture(rope, 2), picture(rope, 20_002)
    keys = make_keys(old.shape[1], HEAD + 2).to(dtype)
    moved = rotate(keys, rope.turn(old, new))
    assert moved.dtype == dtype
    assert torch.equal(moved, rotate(keys.float(), rope.turn(old, new)).to(dtype)), "rounded more than once"
    assert torch.equal(moved[..., HEAD:], keys[..., HEAD:])


def test_rotating_leaves_the_cached_keys_alone(case: tuple[Rope, list[int]]) -> None:
    rope, _ = case
    old, new = picture(rope, 2), picture(rope, 40)
    keys = make_keys(old.shape[1])
    before = keys.clone()
    rotate(keys, rope.turn(old, new))
    assert torch.equal(keys, before)


def test_a_part_of_a_turn_turns_a_part_of_the_keys(case: tuple[Rope, list[int]]) -> None:
    rope, _ = case
    old, new = picture(rope, 2), picture(rope, 40)
    turn = rope.turn(old, new)
    assert turn is not None
    keys = make_keys(old.shape[1])
    assert torch.equal(rotate(keys[3:9], turn.rows(3, 9)), rotate(keys, turn)[3:9])
