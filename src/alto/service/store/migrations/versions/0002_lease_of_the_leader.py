"""lease of the leader"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The default renewal time is long ago, so a server of this version can lead at once; a leader of an older version
    # then finds its epoch outdated.
    with op.batch_alter_table("leader", schema=None) as batch_op:
        batch_op.add_column(sa.Column("renewed_at", sa.Float(), nullable=False, server_default="0"))
        batch_op.drop_column("beat")
