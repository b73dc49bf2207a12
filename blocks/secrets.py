"""Prefect blocks: what must live on the Prefect server and nowhere else."""

from typing import Self

from prefect.blocks.core import Block
from prefect.types import SecretDict
from pydantic import Field, SecretStr, model_validator


class SSHCredentials(Block):
    """How to log in on the nodes: a key as text or a file, else the agent and the usual keys.

    Example:
        ```python
        SSHCredentials(key_file="~/.ssh/id_sparks").save("sparks")
        SSHCredentials(private_key=text, passphrase="...").save("anywhere")
        SSHCredentials().save("agent")
        ```
    """

    _block_type_name = "SSH Credentials"
    _block_type_slug = "ssh-credentials"
    _description = "How sparkrail logs in on the nodes of a cluster."

    private_key: SecretStr | None = Field(None, description="The private key itself, as text.")
    key_file: str | None = Field(None, description="Path of a private key on the control machine.")
    passphrase: SecretStr | None = Field(None, description="Passphrase of that key.")
    use_agent: bool = Field(True, description="Also try the keys of a running SSH agent.")

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.private_key and self.key_file:
            raise ValueError("give private_key or key_file, not both")
        return self


class EngineSecrets(Block):
    """What the engine needs and nobody may read: API key, hub token, further variables.

    Example:
        ```python
        EngineSecrets(api_key="sk-...", environment={"HF_TOKEN": "hf_..."}).save("prod")
        ```
    """

    _block_type_name = "Engine Secrets"
    _block_type_slug = "engine-secrets"
    _description = "Secrets that sparkrail hands to the engine through a file only its user reads."

    api_key: SecretStr | None = Field(None, description="Key that clients of the endpoint send.")
    hub_token: SecretStr | None = Field(None, description="Hugging Face token (HF_TOKEN).")
    environment: SecretDict | None = Field(
        None, description="Further variables for the containers; every value is masked."
    )
