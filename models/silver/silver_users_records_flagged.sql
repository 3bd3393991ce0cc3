{{ config(materialized='view', enabled=(env_var('LAKEHOUSE_SOURCE', 'files') == 'kafka')) }}

{{ lakehouse_patterns.change_data_capture_flags(
    landed('bronze', 'bronze_users_records'),
    columns={
        'id': 'string',
        'login': 'string',
        'email': 'string',
        'registered_at': 'timestamp',
        'first_connection_at': 'timestamp',
        'last_connection_at': 'timestamp',
        'plan': 'string',
        'is_deactivated': 'boolean'
    },
    key='id'
) }}
