import torch

from diagd.backends.native.weights import ALIGNED, CHUNK, PAGE, HugePages


def test_tensors_are_copied_side_by_side():
    pages = HugePages()
    given = [
        torch.arange(7.0).view(7, 1).expand(7, 3),
        torch.arange(-5, 6, dtype=torch.int8),
        torch.empty(0, 4),
        torch.linspace(-1, 1, 130, dtype=torch.bfloat16).view(2, 65).T,
    ]
    kept = [pages.put(tensor) for tensor in given]
    del pages
    for tensor, copy in zip(given, kept, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()
        assert not copy.numel() or copy.data_ptr() % ALIGNED == 0
    assert kept[0].data_ptr() % PAGE == 0
    assert kept[-1].data_ptr() - kept[0].data_ptr() < PAGE


def test_what_fits_into_no_chunk_has_pages_of_its_own():
    pages = HugePages()
    first, large = pages.put(torch.ones(3)), pages.put(torch.ones(1).expand(CHUNK // 4 + 1))
    assert large.data_ptr() % PAGE == 0
    assert large.sum() == CHUNK // 4 + 1
    assert torch.equal(first, torch.ones(3))
