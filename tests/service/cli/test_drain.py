from radixkv.service.cli.main import main
from tests.patience import PATIENCE_S
from tests.service.command_line import fake_service


def test_drain_drains_the_service():
    with fake_service() as (process, address):
        assert main(["drain", "--address", address]) == 0
        assert process.wait(PATIENCE_S) == 0
