import torch

from diagd.families.cosmos import LEVELS, CosmosTokenizer, codes_to_indices
from tests.families.cosmos.scripts import indices_to_codes, quantize
from tests.golden import golden


def test_numbers_become_the_codes_and_ids_of_cosmos():
    values = golden("cosmos_fsq_golden.safetensors")
    codes = quantize(values["z"])
    assert codes.equal(values["codes"])
    assert codes_to_indices(codes).equal(values["indices"])


def test_ids_become_the_codes_of_cosmos():
    values = golden("cosmos_fsq_golden.safetensors")
    assert indices_to_codes(values["indices"]).equal(values["codes"])
    assert indices_to_codes(values["probe_indices"]).equal(values["probe_codes"])


def test_every_id_has_a_code_of_its_own_even_in_bfloat16():
    ids = torch.arange(CosmosTokenizer.codebook_size).view(2, 100, 320)
    codes = indices_to_codes(ids)
    assert (codes.shape, codes.dtype) == ((2, len(LEVELS), 100, 320), torch.float32)
    assert (float(codes.min()), float(codes.max())) == (-1, 1)
    assert codes_to_indices(codes).equal(ids)
    assert codes_to_indices(codes.bfloat16()).equal(ids)
    assert indices_to_codes(ids.int()).equal(codes)


def test_the_first_number_counts_fastest():
    codes = indices_to_codes(torch.tensor([[0, 1, 8, 64, 512, 2560, 12800]]))[0].T
    digits = (codes - codes[0]) * torch.tensor([level // 2 for level in LEVELS])
    assert digits[1:].equal(torch.eye(6))
