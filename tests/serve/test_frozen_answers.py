"""Answers of version 0.2's service to kept requests, frozen in tests/frozen: a later version has to give the same."""

import json

import pytest
from frozen_cases import FROZEN, answer, assert_same, requests, served_guard

ANSWERS = json.loads((FROZEN / "answers.json").read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "tolerance"), [("logits", 1e-9), ("images", 1e-4)])  # the images' model is of float32
def test_answers_to_kept_requests(serving, tmp_path, name, tolerance):
    guard, model = served_guard(name)
    guard.save(tmp_path / "guard.safetensors")
    with serving(tmp_path / "guard.safetensors", model) as running:
        client = running.client()
        answers = {key: answer(client, *request) for key, request in requests(name).items()}
    assert_same(answers, ANSWERS[name], tolerance)
