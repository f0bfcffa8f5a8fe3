"""tables of the service"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "aliases",
        sa.Column("name", sa.String(length=512), primary_key=True),
        sa.Column("tenant", sa.String(length=64), nullable=False, index=True),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("suffix", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False, index=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("moved_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(length=64), nullable=False, unique=True),
        sa.Column("job", sa.String(length=64), nullable=False, index=True),
        sa.Column("task_job", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("metrics", _JSON, nullable=False),
    )
    op.create_table(
        "files",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(length=64), nullable=False, unique=True),
        sa.Column("tenant", sa.String(length=64), nullable=False, index=True),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(length=64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("status_details", sa.Text(), nullable=True),
    )
    op.create_table(
        "job_events",
        sa.Column("job", sa.String(length=64), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", _JSON, nullable=True),
    )
    op.create_table(
        "jobs",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(length=64), nullable=False, unique=True),
        sa.Column("tenant", sa.String(length=64), nullable=False, index=True),
        sa.Column("status", sa.String(length=32), nullable=False, index=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("estimated_finish", sa.BigInteger(), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("training_file", sa.String(length=64), nullable=False),
        sa.Column("validation_file", sa.String(length=64), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("suffix", sa.String(length=64), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("request", _JSON, nullable=False),
        sa.Column("task", _JSON, nullable=False),
        sa.Column("pairs", _JSON, nullable=True),
        sa.Column("error", _JSON, nullable=True),
        sa.Column("result", _JSON, nullable=True),
        sa.Column("fine_tuned_model", sa.Text(), nullable=True),
        sa.Column("run_dir", sa.Text(), nullable=True),
        sa.Column("lease", sa.Integer(), nullable=False),
        sa.Column("num_events", sa.Integer(), nullable=False),
        sa.Column("journal_seq", sa.Integer(), nullable=False),
    )
    op.create_table(
        "leader",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
    )
    op.create_table(
        "models",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(length=512), nullable=False, unique=True),
        sa.Column("tenant", sa.String(length=64), nullable=False, index=True),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("serving", sa.String(length=16), nullable=False),
        sa.Column("serving_details", sa.Text(), nullable=True),
    )
    op.create_table(
        "replays",
        sa.Column("digest", sa.String(length=64), primary_key=True),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False, index=True),
    )
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(length=64), primary_key=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("max_gpus", sa.Integer(), nullable=True),
        sa.Column("max_tasks", sa.Integer(), nullable=True),
        sa.Column("max_bytes", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_s", sa.Float(), nullable=True),
        sa.Column("shares_executors", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=64), primary_key=True),
        sa.Column("tenant", sa.String(length=64), nullable=False, index=True),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(length=64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_after_s", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("file", sa.String(length=64), nullable=True),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=64), primary_key=True),
        sa.Column("tenant", sa.String(length=64), sa.ForeignKey("tenants.name"), nullable=False, index=True),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False, unique=True),
        sa.Column("scopes", _JSON, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
    )
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.String(length=64), primary_key=True),
        sa.Column("upload", sa.String(length=64), sa.ForeignKey("uploads.id"), nullable=False, index=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
    )
