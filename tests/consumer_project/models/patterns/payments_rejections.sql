{{ config(materialized='incremental', incremental_strategy='append') }}

{{ lakehouse_patterns.filter_interceptor_statistics(ref('payments_filtered'), var('payment_conditions')) }}
