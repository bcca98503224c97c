"""Who a caller is, what it may ask for, and whose pages it may share: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import RouterConfig, parse
from penstock.errors import ConfigError, PermissionDenied, Unauthenticated
from penstock.secret import ClusterSecret, digest_of, make_api_key
from penstock.security_config import TenantConfig
from penstock.types import Lane
from penstock.v1 import common_pb2
from router.identity import CANARY, Tenant, Tenants

KEY = make_api_key()
SECRET = ClusterSecret("s" * 40)
ACME = TenantConfig(keys=(digest_of(KEY),), subjects=("acme.example",))


def tenants(**configs: TenantConfig) -> Tenants:
    return Tenants(configs, SECRET)


def test_a_key_is_its_tenant():
    assert tenants(acme=ACME).identify(f"Bearer {KEY}").name == "acme"
    assert tenants(acme=ACME).identify(f"bearer  {KEY} ").name == "acme"


def test_a_certificate_is_its_tenant_and_a_key_goes_before_it():
    found = tenants(acme=ACME, beta=TenantConfig(subjects=("beta.example",)))
    assert found.identify(None, ["other", "beta.example"]).name == "beta"
    assert found.identify(f"Bearer {KEY}", ["beta.example"]).name == "acme"


def test_without_tenants_everybody_is_the_same_nameless_one():
    assert tenants().identify("Bearer anything") == tenants().identify(None) == Tenant()


def test_the_controllers_own_requests_need_no_tenant():
    assert tenants(acme=ACME).identify(f"Bearer {SECRET.token(CANARY)}") == Tenant()


@pytest.mark.parametrize(
    ("authorization", "subjects", "kind", "says"),
    [
        (None, [], Unauthenticated, "authorization: is missing; send your API key"),
        ("Bearer ", [], Unauthenticated, "is no bearer token"),
        (KEY, [], Unauthenticated, "is no bearer token"),
        ("Basic " + KEY, [], Unauthenticated, "is no bearer token"),
        ("Bearer x" + KEY, [], Unauthenticated, "is not known here"),
        ("Bearer " + digest_of(KEY), [], Unauthenticated, "is not known here"),
        ("Bearer " + "k" * 10_000, [], Unauthenticated, "longer than 512"),
        ("Bearer " + SECRET.reveal(), [], Unauthenticated, "is not known here"),
        (None, ["nobody.example"], PermissionDenied, "belong to no tenant"),
    ],
    ids=["none", "empty", "bare", "basic", "longer", "digest", "huge", "secret", "stranger"],
)
def test_refusals_say_why_and_never_repeat_a_key(authorization, subjects, kind, says):
    with pytest.raises(kind, match=says) as caught:
        tenants(acme=ACME).identify(authorization, subjects)
    assert KEY not in caught.value.message


def test_a_tenant_that_is_turned_off_is_refused():
    with pytest.raises(PermissionDenied, match="acme is turned off"):
        tenants(acme=ACME.model_copy(update={"enabled": False})).identify(f"Bearer {KEY}")


def test_two_tenants_cannot_claim_one_key():
    with pytest.raises(ConfigError, match=r"tenants.beta.keys: one of them belongs to acme too"):
        tenants(acme=ACME, beta=TenantConfig(keys=ACME.keys))


def test_a_plain_key_in_the_configuration_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match=r"tenants.acme.keys: .*is no sha256 digest") as caught:
        parse(RouterConfig, {"model": "m", "tenants": {"acme": {"keys": [KEY]}}})
    assert KEY not in caught.value.message


def test_a_secret_in_the_configuration_is_never_shown():
    data = {"model": "m", "security": {"secret": KEY, "tls": {"cert_file": "c", "key_file": "k"}}}
    with pytest.raises(ConfigError, match=r"security: .*security.tls.ca_file is missing") as caught:
        parse(RouterConfig, data)
    del data["security"]["tls"]
    config = parse(RouterConfig, data)
    secret = ClusterSecret.of(config.security)
    shown = f"{caught.value.message} {config!r} {config.model_dump_json()} {secret!r}"
    assert secret.reveal() == KEY
    assert KEY not in shown


def test_lanes():
    tenant = Tenant("acme", TenantConfig(lane=Lane.BULK, max_lane=Lane.STANDARD))
    assert tenant.lane(common_pb2.LANE_UNSPECIFIED) is Lane.BULK
    assert tenant.lane(common_pb2.LANE_STANDARD) is Lane.STANDARD
    with pytest.raises(PermissionDenied, match="lane: interactive is not open to this API key; ask for standard"):
        tenant.lane(common_pb2.LANE_INTERACTIVE)
    with pytest.raises(ConfigError, match="lane = interactive is above max_lane = bulk"):
        parse(TenantConfig, {"lane": "interactive", "max_lane": "bulk"})


def test_pages_are_shared_within_a_tenant_and_a_declared_group_alone():
    group = TenantConfig(share_group="acme")
    found = tenants(acme=TenantConfig(), beta=TenantConfig(), one=group, two=group)
    salts = [found.salt("r1", found.find(name)) for name in ("acme", "beta", "one", "two", "nobody")]
    assert salts[2] == salts[3]
    assert len(set(salts)) == 4  # a group and a tenant of one name included
    assert found.salt("r2", found.find("acme")) != salts[0]


def test_a_salt_cannot_be_computed_without_the_secret():
    salts = {Tenants({}, secret).salt("r1", Tenant("acme")) for secret in (None, SECRET, ClusterSecret("t" * 40))}
    assert len(salts) == 3


@given(st.text(max_size=40) | st.just(f"Bearer {KEY}"), st.lists(st.sampled_from(["acme.example", "x"]), max_size=2))
def test_whatever_is_sent_is_a_tenant_or_a_typed_error(authorization, subjects):
    try:
        tenant = tenants(acme=ACME).identify(authorization, subjects)
    except (Unauthenticated, PermissionDenied):
        return
    assert tenant.name == "acme"
