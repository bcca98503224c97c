"""Tests the shape of the tree: folder, file and function sizes, unique class names, and a docstring in every room."""

from __future__ import annotations

from tests.support.repository import house


def test_no_folder_is_crowded() -> None:
    assert not house.crowded_folders()


def test_no_file_is_too_long() -> None:
    assert not house.long_files()


def test_no_function_is_too_long() -> None:
    assert not house.long_functions()


def test_public_class_names_are_unique() -> None:
    assert not house.repeated_class_names()


def test_every_room_has_an_introduction() -> None:
    assert not house.rooms_without_introduction()
