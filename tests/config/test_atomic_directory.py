import pytest

from radixkv.config.atomic_directory import atomic_directory


def test_a_directory_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "new" / "model"
    with atomic_directory(target) as directory:
        (directory / "file").write_text("text")
        assert not target.exists()
    assert (target / "file").read_text() == "text"
    assert [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127, "数" * 85])
def test_a_directory_may_have_the_longest_name_that_the_file_system_allows(tmp_path, name):
    with atomic_directory(tmp_path / name):
        pass
    assert [*tmp_path.iterdir()] == [tmp_path / name]


def test_nothing_is_left_after_an_error(tmp_path):
    def write():
        with atomic_directory(tmp_path / "model") as directory:
            (directory / "file").write_text("text")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "directory"])
def test_an_existing_file_or_directory_is_not_replaced(tmp_path, is_file):
    target = tmp_path / "model"

    def write():
        with atomic_directory(target) as directory:
            (directory / "file").write_text("new")
            if is_file:
                target.write_text("old")
            else:
                target.mkdir()
                (target / "file").write_text("old")

    with pytest.raises(FileExistsError):
        write()
    assert (target if is_file else target / "file").read_text() == "old"
    assert [*tmp_path.iterdir()] == [target]
