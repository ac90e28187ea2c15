"""`planted_faults.py` ends at a fault whose text is gone. These tests see that without running the others."""

from planted_faults import FAULTS, ROOT


def test_every_fault_changes_a_text_that_its_file_has_once_and_names_tests_that_exist():
    gone = [f"{fault.path}: {fault.old}" for fault in FAULTS if (ROOT / fault.path).read_text().count(fault.old) != 1]
    gone += [test for fault in FAULTS for test in fault.tests if not (ROOT / test).exists()]
    assert gone == []
