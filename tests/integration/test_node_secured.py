"""The Node client against a scheduler with mutual TLS and API keys."""

from __future__ import annotations

from pathlib import Path

from scheduler_svc.security.key_file import add_key
from tests.integration.secured_rig import serving
from tests.support import node
from tests.support.certificates import Authority


async def test_the_node_client_speaks_mutual_tls_and_sends_its_key(tmp_path: Path) -> None:
    """It is answered with all three right, and refused with a clear error without any."""
    node.set_up()
    authority = Authority()
    ca = authority.write(tmp_path)
    cert, key = authority.issue().write(tmp_path, "server")
    own_cert, own_key = authority.issue("client.test").write(tmp_path, "client")
    keys = tmp_path / "keys.toml"
    api_key = add_key(keys, name="a", tenant="tenant-a", admin=False)
    async with serving(
        tmp_path, api_keys=keys, tls_cert=cert, tls_key=key, tls_client_ca=ca
    ) as secured:
        output = await node.run(
            "node",
            "--test",
            "--test-reporter=tap",
            "test/secured/secured.test.js",
            environment={
                "OCTAVO_TEST_TARGET": secured.target,
                "OCTAVO_TEST_CA": str(ca),
                "OCTAVO_TEST_CERT": str(own_cert),
                "OCTAVO_TEST_KEY": str(own_key),
                "OCTAVO_TEST_API_KEY": api_key,
            },
        )
    assert "# fail 0" in output
