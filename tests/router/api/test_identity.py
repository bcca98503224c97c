"""Tests how callers are identified, what each may request and whose cached pages it may share. No I/O."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import RouterConfig, parse
from penstock.config.tenants import TenantConfig
from penstock.errors import ConfigError, PermissionDenied, Unauthenticated
from penstock.rpc.secret import ClusterSecret, ClusterSecrets, digest_of, make_api_key
from penstock.types import Lane
from penstock.v1 import common_pb2
from router.api.identity import CANARY, Tenant, TenantDirectory, Tenants

KEY = make_api_key()
SECRET = ClusterSecret("s" * 40)
ACME = TenantConfig(keys=(digest_of(KEY),), subjects=("acme.example",))


def tenants(**configs: TenantConfig) -> Tenants:
    return make(configs, SECRET)


def make(configs: dict[str, TenantConfig], *secrets: ClusterSecret) -> Tenants:
    directory = TenantDirectory(configs)
    return Tenants(lambda: directory, lambda: ClusterSecrets(secrets[0], secrets) if secrets else None)


def test_a_key_identifies_its_tenant():
    assert tenants(acme=ACME).identify(f"Bearer {KEY}").name == "acme"
    assert tenants(acme=ACME).identify(f"bearer  {KEY} ").name == "acme"


def test_a_certificate_identifies_its_tenant_unless_a_key_is_given():
    found = tenants(acme=ACME, beta=TenantConfig(subjects=("beta.example",)))
    assert found.identify(None, ["other", "beta.example"]).name == "beta"
    assert found.identify(f"Bearer {KEY}", ["beta.example"]).name == "acme"


def test_without_tenants_all_callers_are_one_nameless_tenant():
    assert tenants().identify("Bearer anything") == tenants().identify(None) == Tenant()


def test_the_controllers_own_requests_need_no_tenant():
    assert tenants(acme=ACME).identify(f"Bearer {SECRET.token(CANARY)}") == Tenant()


@pytest.mark.parametrize(
    ("authorization", "subjects", "kind", "says"),
    [
        (None, [], Unauthenticated, "authorization: is missing; send your API key"),
        ("Bearer ", [], Unauthenticated, "is not a bearer token"),
        (KEY, [], Unauthenticated, "is not a bearer token"),
        ("Basic " + KEY, [], Unauthenticated, "is not a bearer token"),
        ("Bearer x" + KEY, [], Unauthenticated, "is not known here"),
        ("Bearer " + digest_of(KEY), [], Unauthenticated, "is not known here"),
        ("Bearer " + "k" * 10_000, [], Unauthenticated, "longer than 512"),
        ("Bearer " + SECRET.reveal(), [], Unauthenticated, "is not known here"),
        (None, ["nobody.example"], PermissionDenied, "belong to no tenant"),
    ],
    ids=["none", "empty", "bare", "basic", "longer", "digest", "huge", "secret", "stranger"],
)
def test_refusals_state_the_reason_and_never_repeat_a_key(authorization, subjects, kind, says):
    with pytest.raises(kind, match=says) as caught:
        tenants(acme=ACME).identify(authorization, subjects)
    assert KEY not in caught.value.message


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", None], ids=["key", "certificate"])
def test_a_disabled_tenant_is_refused(authorization):
    found = tenants(acme=ACME.model_copy(update={"enabled": False}), beta=TenantConfig(subjects=("beta.example",)))
    with pytest.raises(PermissionDenied, match="acme is turned off"):
        found.identify(authorization, ["acme.example"])
    assert found.identify(None, ["beta.example"]).name == "beta"


def test_only_the_controller_may_use_the_control_port():
    found = tenants(acme=ACME)
    assert found.identify_controller(f"Bearer {SECRET.token(CANARY)}") == Tenant()
    for other in (None, f"Bearer {KEY}", f"Bearer {SECRET.token('tickets')}", f"Bearer {SECRET.reveal()}"):
        with pytest.raises(Unauthenticated, match="this port is only for the controller"):
            found.identify_controller(other)
    with pytest.raises(Unauthenticated, match="this port is only for the controller"):
        Tenants({}).identify_controller(f"Bearer {KEY}")  # without a secret nobody is the controller


def test_the_controller_is_still_identified_by_the_replaced_secret():
    directory, new = TenantDirectory({"acme": ACME}), ClusterSecret("n" * 40)
    secrets = [ClusterSecrets(SECRET, (SECRET,))]
    found = Tenants(lambda: directory, lambda: secrets[-1])
    assert found.identify(f"Bearer {SECRET.token(CANARY)}") == Tenant()
    with pytest.raises(Unauthenticated):
        found.identify(f"Bearer {new.token(CANARY)}")
    secrets.append(ClusterSecrets(new, (new, SECRET)))
    assert found.identify(f"Bearer {new.token(CANARY)}") == Tenant()
    secrets.append(ClusterSecrets(new, (new,)))
    with pytest.raises(Unauthenticated):
        found.identify(f"Bearer {SECRET.token(CANARY)}")


def test_metrics_have_a_token_of_their_own():
    found, token = tenants(acme=ACME), make_api_key()
    found.check_scraper(f"Bearer {token}", token)
    for other in (None, f"Bearer {KEY}"):
        with pytest.raises(Unauthenticated, match="is not the metrics token"):
            found.check_scraper(other, token)


def test_without_a_token_metrics_are_open_only_if_there_are_no_tenants():
    tenants().check_scraper(None, "")
    with pytest.raises(PermissionDenied, match="metrics cover all tenants"):
        tenants(acme=ACME).check_scraper(f"Bearer {KEY}", "")


def test_a_key_of_the_greatest_length_is_accepted():
    key = "k" * 512
    assert tenants(acme=TenantConfig(keys=(digest_of(key),))).identify(f"Bearer {key}").name == "acme"


def test_two_tenants_cannot_claim_one_key():
    with pytest.raises(ConfigError, match=r"tenants.beta.keys: one of them also belongs to acme"):
        tenants(acme=ACME, beta=TenantConfig(keys=ACME.keys))


def test_two_tenants_cannot_claim_one_certificate():
    with pytest.raises(ConfigError, match=r"tenants.beta.subjects: one of them also belongs to acme"):
        tenants(acme=ACME, beta=TenantConfig(subjects=ACME.subjects))


def test_a_plain_key_in_the_configuration_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match=r"tenants.acme.keys: .*is not a sha256 digest") as caught:
        parse(RouterConfig, {"model": "m", "tenants": {"acme": {"keys": [KEY]}}})
    assert KEY not in caught.value.message


def test_a_secret_in_the_configuration_is_never_shown():
    """A secret is only read from a file; one in the configuration is refused and not repeated."""
    with pytest.raises(ConfigError, match=r"unknown key security\.secret; remove it") as caught:
        parse(RouterConfig, {"model": "m", "security": {"secret": KEY}})
    secrets = ClusterSecrets.only(ClusterSecret(KEY))
    assert KEY not in f"{caught.value.message} {secrets!r}"
    with pytest.raises(ConfigError, match=r"security: .*security.tls.ca_file is missing"):
        parse(RouterConfig, {"model": "m", "security": {"tls": {"cert_file": "c", "key_file": "k"}}})


def test_a_tenants_default_lane_is_its_own_and_none_above_its_best_is_allowed():
    tenant = Tenant("acme", TenantConfig(lane=Lane.BULK, max_lane=Lane.STANDARD))
    assert tenant.lane(common_pb2.LANE_UNSPECIFIED) is Lane.BULK
    assert tenant.lane(common_pb2.LANE_STANDARD) is Lane.STANDARD
    with pytest.raises(PermissionDenied, match="lane: interactive is not open to this API key; ask for standard"):
        tenant.lane(common_pb2.LANE_INTERACTIVE)
    with pytest.raises(ConfigError, match="lane = interactive is above max_lane = bulk"):
        parse(TenantConfig, {"lane": "interactive", "max_lane": "bulk"})


def test_pages_are_shared_only_within_a_tenant_or_a_declared_group():
    group = TenantConfig(share_group="acme")
    configs = {"acme": TenantConfig(), "beta": TenantConfig(), "one": group, "two": group}
    found, named = tenants(**configs), {name: Tenant(name, config) for name, config in configs.items()}
    salts = [found.salt("r1", tenant.cache_scope) for tenant in (*named.values(), Tenant())]
    assert salts[2] == salts[3]
    assert len(set(salts)) == 4  # even a group and a tenant of the same name have different salts
    assert found.salt("r2", named["acme"].cache_scope) != salts[0]


def test_a_salt_cannot_be_computed_without_the_secret():
    salts = {
        make({}, *secret).salt("r1", Tenant("acme").cache_scope)
        for secret in ((), (SECRET,), (ClusterSecret("t" * 40),))
    }
    assert len(salts) == 3


@given(st.text(max_size=40) | st.just(f"Bearer {KEY}"), st.lists(st.sampled_from(["acme.example", "x"]), max_size=2))
def test_any_credentials_give_a_tenant_or_a_typed_error(authorization, subjects):
    try:
        tenant = tenants(acme=ACME).identify(authorization, subjects)
    except (Unauthenticated, PermissionDenied):
        return
    assert tenant.name == "acme"
