"""Methods by name."""

import pytest

import igeood
from igeood.detectors import Detector, method_name
from igeood.errors import InputError


def test_the_names_of_the_black_box():
    expected = {"msp", "odin", "energy", "kl-sum", "kl-min", "igeood-logits", "igeood-logits-min"}
    assert expected <= set(igeood.METHODS)


@pytest.mark.parametrize("name", sorted(igeood.METHODS))
def test_names_and_detectors_are_each_others(name):
    made = igeood.detector(name)
    assert isinstance(made, Detector)
    assert method_name(made) == name


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(InputError, match=r"no 'energi'; did you mean 'energy'\?"):
        igeood.detector("energi")
    with pytest.raises(InputError, match=r"^method: no 'zzz'; methods: msp, odin, energy, kl-sum"):
        igeood.detector("zzz")
    with pytest.raises(InputError, match=r"no 'MSP'; did you mean 'msp'\?"):
        igeood.detector("MSP")
    with pytest.raises(InputError, match=r"no 'igeood-logit'; did you mean 'igeood-logits' or '[^']*'\? methods: "):
        igeood.detector("igeood-logit")
    with pytest.raises(InputError, match=r"no 'maha'; did you mean 'mahalanobis'\? "):
        igeood.detector("maha")


def test_unknown_and_fixed_options():
    with pytest.raises(
        InputError, match=r"temprature: 'energy' has no such option; it takes temperature, probabilities$"
    ):
        igeood.detector("energy", temprature=1.0)
    with pytest.raises(InputError, match="reduce: 'kl-sum' means reduce='sum'"):
        igeood.detector("kl-sum", reduce="min")


def test_a_detector_of_ones_own_has_no_name():
    class Mine(igeood.MaxSoftmax):
        pass

    with pytest.raises(InputError, match=r"^detector: Mine is not in the catalogue, which has msp, odin"):
        method_name(Mine())
