import pytest

from kv_transfer.ucx_device import choose_device, find_rdma_devices, outlook

ADDRESSES = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.2"], "ib0": ["192.0.2.9"]}


def test_the_interface_with_the_address_is_the_device():
    assert choose_device("127.0.0.1", ADDRESSES, {}) == "lo"
    assert choose_device("localhost", ADDRESSES, {}) == "lo"
    assert choose_device("::1", ADDRESSES, {}) == "lo"
    assert choose_device("192.0.2.2", ADDRESSES, {"ib0": "mlx5_0:1"}) == "eth0"


def test_an_interface_of_rdma_hardware_gives_its_rdma_device():
    assert choose_device("192.0.2.9", ADDRESSES, {"ib0": "mlx5_0:1"}) == "mlx5_0:1"


def test_an_address_that_no_interface_has_is_refused():
    with pytest.raises(ValueError, match=r"address 192\.0\.2\.77"):
        choose_device("192.0.2.77", ADDRESSES, {})


def test_rdma_devices_are_found_by_the_interfaces_of_their_hardware(tmp_path):
    (tmp_path / "mlx5_0" / "device" / "net" / "ib0").mkdir(parents=True)
    (tmp_path / "mlx5_1").mkdir()  # without an interface, so without an address
    assert find_rdma_devices(tmp_path) == {"ib0": "mlx5_0:1"}
    assert find_rdma_devices(tmp_path / "absent") == {}


def seen(host, wanted=None, *, is_installed=True):
    rdma = {"ib0": "mlx5_0:1"}
    return outlook(host, wanted, is_installed=is_installed, addresses=ADDRESSES, rdma_devices=rdma)


def test_nixl_is_best_where_the_address_is_that_of_rdma_hardware_and_the_package_is_there():
    assert seen("192.0.2.9").is_best
    assert not seen("192.0.2.9", is_installed=False).is_best
    assert not seen("127.0.0.1").is_best


def test_the_setting_comes_before_the_address():
    assert seen("127.0.0.1", "mlx5_0:1").is_best
    assert seen("192.0.2.9", "eth0").device == "eth0"
    assert not seen("192.0.2.9", "eth0").is_best


def test_an_address_of_nobody_is_a_problem_to_be_told():
    assert "192.0.2.77" in seen("192.0.2.77").problem
    assert seen("192.0.2.77").device is None
    assert not seen("192.0.2.77").is_best
