{% snapshot plain_check %}
    {{ config(unique_key='order_id', strategy='check', check_cols=['status'], hard_deletes='invalidate') }}
    select * from {{ ref('orders') }}
{% endsnapshot %}
