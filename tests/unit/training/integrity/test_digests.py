"""The digests of the ledger: their definition, and that no change and no layout escapes or disturbs them."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from torch import Tensor

from lockstep.training.integrity.digests import BLOCK, Digester, optimizer_digest

CPU = torch.device("cpu")
MASK = 2**64 - 1


def by_definition(tensors: dict[str, Tensor], lines: list[str] | None = None) -> int:
    """The definition in plain Python, element by element."""

    def odd(n: int) -> int:
        z = (n + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return (z ^ (z >> 31)) | 1

    total = 0
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        size = min(tensor.element_size(), 4)
        words = [int.from_bytes(raw[i : i + size], "little", signed=True) for i in range(0, len(raw), size)]
        s = sum(word * odd(i % 65536) * odd(2**32 + i // 65536) for i, word in enumerate(words))
        digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode()).digest()
        k, r = struct.unpack("<QQ", digest[:16])
        total += s * (k | 1) + r
    if lines:
        total += struct.unpack("<Q", hashlib.sha256("\n".join(sorted(lines)).encode()).digest()[:8])[0]
    return total & MASK


def some(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made.to(dtype) if dtype.is_floating_point or dtype.is_complex else (made * 50).to(dtype)


KINDS = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_digest_is_the_definition(dtype: torch.dtype) -> None:
    tensors = {"a.weight": some((7, 3), dtype), "a.bias": some((3,), dtype), "scalar": some((), dtype)}
    tensors |= {"none": some((0, 4), dtype), "few": some((4,), dtype)}
    assert Digester(CPU).digest(tensors) == by_definition(tensors)


def test_a_digest_of_many_blocks_is_the_definition() -> None:
    tensors = {
        "exact": some((2, BLOCK)),
        "more": some((BLOCK + 3,)),
        "doubles": some((BLOCK,), torch.float64),
    }
    assert Digester(CPU).digest(tensors) == by_definition(tensors)


def test_where_a_tensor_lies_does_not_matter() -> None:
    whole = some((2, 6, 5, 4))
    layouts = [
        whole.to(memory_format=torch.channels_last),
        torch.cat([torch.zeros(3), whole.reshape(-1)])[3:].view(whole.shape),
        whole.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.stack([whole, whole], -1)[..., 0],
    ]
    digester = Digester(CPU)
    wanted = digester.digest({"w": whole})
    assert [digester.digest({"w": layout}) for layout in layouts] == [wanted] * 4


def test_a_sparse_tensor_counts_as_the_dense_one() -> None:
    dense = some((6, 4)) * (torch.arange(6) % 2).view(6, 1)
    assert Digester(CPU).digest({"w": dense.to_sparse(1)}) == Digester(CPU).digest({"w": dense + 0.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(70_000, 3), (9, 65_537), (5, 1), (70_000,)])
def test_rows_count_by_their_places_in_the_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of a table of several blocks; of one row, of none, and of rows that are given twice."""
    for rows in ([], [2], [0, 3, shape[0] - 1]):
        dense = torch.zeros(shape, dtype=dtype)
        dense[rows] = some((len(rows), *shape[1:])).to(dtype)
        index = torch.tensor([[*rows, *rows]])
        twice = torch.cat([dense[rows] / 2, dense[rows] / 2])
        sparse = torch.sparse_coo_tensor(index, twice, shape, check_invariants=True)
        assert Digester(CPU).digest({"w": sparse}) == Digester(CPU).digest({"w": dense + 0.0})


def test_the_order_of_tensors_does_not_matter_and_their_names_and_shapes_do() -> None:
    digester, a, b = Digester(CPU), some((4, 6)), some((24,))
    assert digester.digest({"a": a, "b": b}) == digester.digest({"b": b, "a": a})
    others = [{"a": b, "b": a}, {"a": a, "c": b}, {"a": a.view(6, 4), "b": b}, {"a": a}]
    found = {digester.digest(other) for other in others} | {digester.digest({"a": a, "b": b})}
    assert len(found) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_flipped_bit_and_every_swap_is_seen(dtype: torch.dtype) -> None:
    """The values include zeros of both signs and pairs that differ in the sign alone."""
    digester = Digester(CPU)
    values = torch.tensor([0.0, -0.0, 1.5, -1.5, 3e-5, -3e-5, 2.0, 0.0], dtype=dtype)
    contents = {bytes(values.view(torch.uint8).tolist())}
    for bit in range(values.numel() * values.element_size() * 8):
        raw = values.view(torch.uint8).clone()
        raw[bit // 8] ^= 1 << bit % 8
        contents.add(bytes(raw.tolist()))
    for i in range(8):
        for j in range(i):
            order = list(range(8))
            order[i], order[j] = j, i
            contents.add(bytes(values[order].view(torch.uint8).tolist()))
    assert len(contents) > 150
    found = {
        digester.digest({"w": torch.tensor(list(raw), dtype=torch.uint8).view(dtype)}) for raw in contents
    }
    assert len(found) == len(contents)


@pytest.mark.scenario
def test_pairs_of_signs_are_seen() -> None:
    """Where only the highest bits change, the sums of products alone tell: each pair of 300 gives another digest."""
    digester, values = Digester(CPU), some((300,))
    found = set()
    for i in range(300):
        for j in range(i):
            changed = values.clone()
            changed[[i, j]] *= -1
            if (i * j) % 7 == 0:
                found.add(digester.digest({"w": changed}))
    assert digester.digest({"w": values}) not in found
    assert len(found) == sum((i * j) % 7 == 0 for i in range(300) for j in range(i))


def test_an_optimizers_state_and_settings_are_in_its_digest() -> None:
    parameter = torch.nn.Parameter(some((5, 3)))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = some((5, 3))
    optimizer.step()
    digester = Digester(CPU)

    def digest() -> int:
        return optimizer_digest(digester, optimizer.state_dict())

    found = [digest()]
    assert digest() == found[0]
    optimizer.state[parameter]["exp_avg_sq"][0, 0] *= -1
    found.append(digest())
    optimizer.state[parameter]["step"] += 1
    found.append(digest())
    optimizer.param_groups[0]["lr"] = 0.1000000000000001
    found.append(digest())
    assert len(set(found)) == 4
