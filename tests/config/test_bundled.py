from cgprof.config.bundled import bundled_folder, bundled_names, find_bundled


def test_bundled_names_are_found_whatever_their_case():
    assert {"qwen3-30b-a3b", "qwen3-8b", "qwen3-0.6b", "mixtral-8x7b", "tiny-moe"} <= set(
        bundled_names("models")
    )
    assert (
        find_bundled("models", "Qwen3-30B-A3B") == bundled_folder("models") / "qwen3-30b-a3b.json"
    )
    assert find_bundled("runs", "tiny") == bundled_folder("runs") / "tiny.toml"
    assert find_bundled("runs", "tiny-moe") is None


def test_bundled_model_may_be_a_directory(tmp_path, monkeypatch):
    models = tmp_path / "configs" / "models"
    for name in ("Trained", "both", "empty"):
        (models / name).mkdir(parents=True)
    for name in ("Trained/config.json", "both/config.json", "both.json", "alone.json"):
        (models / name).write_text("{}")
    monkeypatch.setattr("cgprof.config.bundled._PACKAGE", tmp_path)
    assert bundled_names("models") == ("Trained", "alone", "both")
    assert find_bundled("models", "trained") == models / "Trained" / "config.json"
    assert find_bundled("models", "both") == models / "both" / "config.json"
    assert find_bundled("models", "config") is None
